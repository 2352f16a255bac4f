// Confusion matrices. Rows are true classes, columns are predicted classes.

const INK = [11, 79, 134], PAPER = [255, 255, 255];
const MOST_NUMBERS = 30;

function shade(share) { return PAPER.map((light, at) => Math.round(light + (INK[at] - light) * share)); }

function luminance(rgb) {
  const [red, green, blue] = rgb.map((one) => (one / 255 <= 0.03928 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

// The text colour for a background `rgb`: black or white, whichever has more contrast.
function inkOn(rgb) { return luminance(rgb) > 0.18 ? "#000000" : "#ffffff"; }

function matrixTable(counts, told) {
  const head = make("tr", {}, make("th", { scope: "col" }, "true \\ taken for"), ...counts.map((_, at) => make("th", { scope: "col" }, String(at))));
  const rows = counts.map((row, own) => {
    const sum = row.reduce((a, b) => a + b, 0) || 1;
    return make("tr", {}, make("th", { scope: "row" }, String(own)), ...row.map((count, other) => {
      const color = shade(count / sum);
      const cell = make("td", { title: `${count} records of class ${own} taken for ${other}: ${((100 * count) / sum).toFixed(1)} %` }, count ? String(count) : "");
      cell.style.backgroundColor = `rgb(${color})`;
      cell.style.color = inkOn(color);
      return cell;
    }));
  });
  return make("table", { class: "confusion", "aria-label": told }, make("thead", {}, head), make("tbody", {}, ...rows));
}

function matrixPicture(counts, told) {
  const size = counts.length, canvas = make("canvas", { width: size, height: size, role: "img", "aria-label": told });
  canvas.style.width = "520px";
  const brush = canvas.getContext("2d"), pixels = brush.createImageData(size, size);
  counts.forEach((row, own) => {
    const sum = row.reduce((a, b) => a + b, 0) || 1;
    row.forEach((count, other) => pixels.data.set([...shade(count / sum), 255], 4 * (own * size + other)));
  });
  brush.putImageData(pixels, 0, 0);
  return canvas;
}

function confusions() {
  const found = data.panels.flatMap((panel) => panel.lines.filter((line) => line.confusion.length).map((line) => ({ panel, line })));
  if (!found.length) return null;
  const where = data.panels.length > 1 ? (panel) => `, ${panel.title}` : () => "";
  const name = ({ panel, line }) => `${data.methods[line.method].name}${where(panel)}`;
  const host = make("div", { class: "wide" });
  let shown = 0;
  const paint = () => {
    const { line } = found[shown], told = `Confusion matrix of ${name(found[shown])}`;
    host.replaceChildren(line.confusion.length > MOST_NUMBERS ? matrixPicture(line.confusion, told) : matrixTable(line.confusion, told));
  };
  const best = found.reduce((first, one, at) => (one.line.final[0] > found[first].line.final[0] ? at : first), 0);
  shown = best;
  const pick = choice("Method", found.map((one, at) => [String(at), name(one)]), String(best), (value) => { shown = Number(value); paint(); });
  const told = ["Numbers of test records by true class (rows) and predicted class (columns), after the last round, summed over the finished seeds. A darker cell has a larger share of its row."];
  if (data.untold) told.push(`${data.untold} further matrices are too large for a page; result.json of each run has them.`);
  return [make("div", { class: "controls" }, pick), show(host, paint), make("p", { class: "small" }, told.join(" "))];
}
