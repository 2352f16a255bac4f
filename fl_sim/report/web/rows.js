// Charts with one row per method: final accuracy, costs until a target accuracy, accuracy of the clients.

// Draw a chart with a row (name, marks, value) for each of `rows`: {method, text, marks(x)}. `low`, `high`: axis range.
function rowChart(host, rows, [low, high], unit) {
  const x = (value) => `${Math.max(0, Math.min(100, (100 * (value - low)) / (high - low))).toFixed(2)}%`;
  const parts = rows.map((row) => make("div", { class: "row" },
    make("div", { class: "name", title: data.methods[row.method].label }, data.methods[row.method].name),
    make("div", { class: "track" }, draw("svg", { "aria-hidden": "true" },
      draw("line", { class: "grid", x1: 0, x2: "100%", y1: 11, y2: 11 }), ...row.marks(x, lineStyle(row.method).stroke))),
    make("div", { class: "value" }, row.text)));
  const scaleRow = draw("svg", { class: "scale", "aria-hidden": "true" }, ...ticks(low, high, low ? 6 : 4).map((value) =>
    draw("text", { class: "tick", x: x(value), y: 13, "text-anchor": value === low ? "start" : value === high ? "end" : "middle" }, number(value))));
  const bottom = make("div", { class: "row" }, make("div", { class: "name" }), make("div", { class: "track" }, scaleRow,
    make("div", { class: "small axis-name" }, unit)), make("div", { class: "value" }));
  host.replaceChildren(make("div", { class: "rows" }, ...parts, bottom));
  if (!rows.length) host.replaceChildren(make("p", { class: "small" }, "The shown methods have no such values."));
}

function bar(x, from, to, color, thick = 3) {
  return draw("line", { x1: x(from), x2: x(to), y1: 11, y2: 11, stroke: color, "stroke-width": thick });
}

function dot(x, value, color, hollow = false) {
  const look = hollow ? { fill: "var(--paper)", stroke: color, "stroke-width": 2, r: 4 } : { fill: color, stroke: "var(--paper)", "stroke-width": 1, r: 5 };
  return draw("circle", { cx: x(value), cy: 11, ...look });
}

function stroke(x, value, color) {
  return draw("line", { x1: x(value), x2: x(value), y1: 4, y2: 18, stroke: color, "stroke-width": 2.5 });
}

// Return the lines sorted by `value`, by default the highest first. Upper bounds come last.
function ordered(lines, value, isDown = true) {
  const bound = (line) => (data.methods[line.method].bound ? 1 : 0);
  return [...lines].sort((a, b) => bound(a) - bound(b) || (isDown ? value(b) - value(a) : value(a) - value(b)));
}

function finalRows(panel, host) {
  const lines = ordered(visible(panel).filter((line) => line.final[0] !== null), (line) => line.final[0]);
  const alike = data.panels.filter((one) => one.data === panel.data).flatMap(visible).filter((line) => line.final[0] !== null);
  const range = percentRange(
    alike.map(({ final }) => final[0] - (final[1] || 0)), alike.flatMap(({ final, best }) => [final[0] + (final[1] || 0), best[0] ?? 0]));
  rowChart(host, lines.map((line) => ({
    method: line.method, text: line.final[2],
    marks: (x, color) => [
      bar(x, line.final[0] - (line.final[1] || 0), line.final[0] + (line.final[1] || 0), color),
      dot(x, line.best[0], color, true), dot(x, line.final[0], color)],
  })), range, "test accuracy (%)");
}

const goal = { step: 0, unit: "round" };
const UNITS = { round: "rounds", mb: "MB", seconds: "seconds", virtual_seconds: "virtual seconds" };

function goalRows(panel, host) {
  const at = (line) => line.reached[goal.step];
  const there = visible(panel).filter((line) => at(line).of);
  const taken = (line) => at(line)[goal.unit] || [null, null];  // a run without a clock has no virtual seconds
  const value = (line) => (taken(line)[0] === null ? Infinity : taken(line)[0]);
  const lines = ordered(there, (line) => Math.min(value(line), 1e300), false);
  const high = Math.max(...lines.map(value).filter(Number.isFinite), 0) * 1.05 || 1;
  rowChart(host, lines.map((line) => {
    const [mean, deviation] = taken(line), all = at(line).there === at(line).of;
    const missed = at(line).there ? "not told" : "not reached";
    const text = mean === null ? missed : spreadText([mean, deviation], (one) => number(one, 3));
    return {
      method: line.method, text: all || mean === null ? text : `${text} (${at(line).there} of ${at(line).of})`,
      marks: (x, color) => (mean === null ? [] : [bar(x, 0, mean, color, 7), bar(x, mean - (deviation || 0), mean + (deviation || 0), "var(--ink)", 1.5)]),
    };
  }), [0, high], UNITS[goal.unit]);
}

// Return the index of the user's target; else of the highest target that all runs of any method reached; else 0.
function firstGoal() {
  if (data.aim !== null) return data.aim;
  const lines = data.panels.flatMap((panel) => panel.lines).filter((line) => !data.methods[line.method].bound);
  const got = data.targets.map((_, at) => lines.some(({ reached }) => reached[at].of && reached[at].there === reached[at].of));
  return Math.max(0, got.lastIndexOf(true));
}

function clientRows(panel, host) {
  const lines = ordered(visible(panel).filter((line) => line.clients), (line) => line.clients.mean);
  rowChart(host, lines.map((line) => {
    const { mean, worst, quantiles: q } = line.clients;
    return {
      method: line.method, text: `${percentText(mean)}, worst ${percentText(worst)}`,
      marks: (x, color) => [
        ...(q.length === 11 ? [bar(x, q[0], q[10], color, 1.5), bar(x, q[1], q[9], color, 9), stroke(x, q[5], "var(--ink)")] : []),
        dot(x, worst, color, true), dot(x, mean, color)],
    };
  }), [0, 100], "accuracy at a client (%)");
}

function perPanel(paint, wanted = () => true) {
  return make("div", { class: "panels" }, ...data.panels.filter(wanted).map((panel) => make("figure", { class: "panel" },
    make("h3", {}, panel.title), show(make("div", {}), (host) => paint(panel, host)))));
}

function finals() {
  return [perPanel(finalRows), make("p", { class: "small" },
    "Dot: test accuracy after the last round, mean over the finished seeds; line: ± sample standard deviation; ring: best evaluated round.")];
}

function goals() {
  goal.step = firstGoal();
  const change = (name) => (value) => { goal[name] = name === "step" ? Number(value) : value; repaint(); };
  const controls = make("div", { class: "controls" },
    choice("To a test accuracy of", data.targets.map((one, at) => [String(at), `${one} %`]), String(goal.step), change("step")),
    choice("in", Object.entries(UNITS).filter(([unit]) => unit === "round" || known(unit)), goal.unit, change("unit")));
  return [controls, perPanel(goalRows), make("p", { class: "small" },
    "Costs until the end of the first evaluated round with this accuracy, including the work before the first round. Mean over the runs that reached this accuracy; thin line: ± sample standard deviation.")];
}

function clients() {
  const has = (panel) => panel.lines.some((line) => line.clients);
  if (!data.panels.some(has)) return null;
  return [perPanel(clientRows, has), make("p", { class: "small" },
    "The last model's accuracy at each client (client_accuracy_is in result.json names the records). Dot: mean; ring: mean of the worst tenth of the clients; " +
    "thick bar: all but the lowest and the highest tenth; thin line: from the lowest to the highest; stroke: median. Private runs do not show these values.")];
}
