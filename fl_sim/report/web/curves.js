// Curves over rounds, bytes, seconds, virtual seconds or epsilon. Each data set and partition has a panel.

const MEASURES = { accuracy: "test accuracy (%)", loss: "test loss (nats)" };
const AXES = {
  round: "round", mb: "MB to and from all clients", seconds: "seconds",
  virtual_seconds: "virtual seconds (simulated devices)", epsilon: "epsilon spent (rounded up)",
};
const state = { measure: "accuracy", x: "round", log: false, full: data.full, hidden: new Set() };

function visible(panel) { return panel.lines.filter((line) => !state.hidden.has(line.method)); }

// Return the points of a line that can be drawn: [{x, y, deviation, round}].
function points(line) {
  const { mean, deviation } = line[state.measure];
  const found = line.round.map((round, at) => ({
    round, x: line[state.x] ? line[state.x][at] : null, y: mean[at], deviation: deviation.length ? deviation[at] : null,
  }));
  return found.filter(({ x, y }) => x !== null && y !== null && (!state.log || y > 0)).sort((a, b) => a.x - b.x);
}

function axisName(panel) { return state.x === "round" ? panel.x : AXES[state.x]; }

// Return the range of the vertical axis of a panel, including deviations. Panels of the same data set share a range.
function yRange(panel) {
  const alike = data.panels.filter((one) => one.data === panel.data);
  const found = alike.flatMap((one) => visible(one).flatMap(points));
  if (!found.length) return state.log ? [0.1, 1] : [0, 1];
  const means = found.map(({ y }) => y), low = Math.min(...means);
  const lows = found.map(({ y, deviation }) => y - (deviation || 0)), highs = found.map(({ y, deviation }) => y + (deviation || 0));
  if (state.log) return [Math.max(Math.min(...lows), low / 3) / 1.1, Math.max(...highs) * 1.1];
  if (state.measure !== "accuracy") return [0, Math.max(...highs) * 1.05 || 1];
  return percentRange(lows, highs);
}

// Return the range of an axis in percent: 0 to 100, or the range of the values with at least five percentage points.
function percentRange(lows, highs) {
  if (state.full || !lows.length) return [0, 100];
  const from = Math.max(0, Math.min(...lows)), to = Math.min(100, Math.max(...highs));
  const room = Math.max(0.04 * (to - from), 5 - (to - from)) / 2;
  return [Math.max(0, from - room), Math.min(100, to + room)];
}

function paintCurves(panel, host) {
  const lines = visible(panel).map((line) => ({ line, found: points(line) })).filter(({ found }) => found.length);
  const box = { width: Math.max(240, host.clientWidth), height: 290, left: 62, right: 12, top: 10, bottom: 42 };
  const svg = draw("svg", { viewBox: `0 0 ${box.width} ${box.height}`, height: box.height, "aria-hidden": "true" });
  const xs = lines.flatMap(({ found }) => [found[0].x, found[found.length - 1].x]);
  const range = xs.length ? [state.x === "round" ? Math.min(...xs) : 0, Math.max(...xs)] : [0, 1];
  if (range[0] === range[1]) range[0] -= 1;
  const [low, high] = yRange(panel);
  // The bands of many methods would hide each other. Bars to the right of the last round replace them.
  const spread = lines.filter(({ found }) => found.some(({ deviation }) => deviation));
  const bars = spread.length > MOST_BANDS ? spread : [];
  const x = scale(range[0], range[1], box.left, box.width - box.right - 7 * bars.length);
  const y = scale(low, high, box.height - box.bottom, box.top, state.log);
  svg.append(...frame(panel, box, range, [low, high], x, y));
  for (const { line, found } of lines) svg.append(...trace(line, found, x, y, [low, high], !bars.length));
  bars.forEach(({ line, found }, at) => svg.append(endBar(line, found[found.length - 1], x(range[1]) + 7 * (at + 1), y, [low, high])));
  if (!lines.length) svg.append(nothing(panel, box));
  const marks = draw("g");
  svg.append(marks);
  host.replaceChildren(svg);
  follow(host, panel, lines, box, x, y, marks);
}

function nothing(panel, box) {
  const told = visible(panel).length ? "not known for any of the methods shown" : "all methods are hidden";
  return draw("text", { x: box.width / 2, y: box.height / 2, "text-anchor": "middle" }, told);
}

function frame(panel, box, [left, right], [low, high], x, y) {
  const parts = [], base = box.height - box.bottom;
  for (const value of ticks(low, high, 6, state.log)) {
    parts.push(draw("line", { class: "grid", x1: box.left, x2: box.width - box.right, y1: y(value), y2: y(value) }));
    parts.push(draw("text", { class: "tick", x: box.left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
  }
  const places = ticks(left, right, Math.max(2, Math.floor(box.width / 65)));
  for (const value of state.x === "round" ? places.filter(Number.isInteger) : places) {
    parts.push(draw("text", { class: "tick", x: x(value), y: base + 16, "text-anchor": "middle" }, number(value)));
  }
  parts.push(draw("line", { class: "axis", x1: box.left, x2: box.width - box.right, y1: base, y2: base }));
  parts.push(draw("text", { x: (box.left + box.width) / 2, y: box.height - 6, "text-anchor": "middle" }, axisName(panel)));
  const middle = (box.top + base) / 2;
  parts.push(draw("text", { class: "axis-name", x: 14, y: middle, transform: `rotate(-90 14 ${middle})`, "text-anchor": "middle" }, MEASURES[state.measure]));
  return parts;
}

const MOST_BANDS = 4;

function endBar(line, { y: mean, deviation }, place, y, [low, high]) {
  const { stroke: color } = lineStyle(line.method), inside = (value) => y(Math.min(high, Math.max(low, value)));
  return draw("g", { class: "end-bar" },
    draw("line", { x1: place, x2: place, y1: inside(mean - (deviation || 0)), y2: inside(mean + (deviation || 0)), stroke: color, "stroke-width": 1.5 }),
    draw("circle", { cx: place, cy: inside(mean), r: 2.5, fill: color }));
}

function trace(line, found, x, y, [low, high], hasBand) {
  const style = lineStyle(line.method), parts = [];
  const inside = (value) => y(Math.min(high, Math.max(low, value)));
  if (found.length === 1) return [draw("circle", { cx: x(found[0].x), cy: y(found[0].y), r: 4, fill: style.stroke })];
  if (hasBand && found.some(({ deviation }) => deviation)) {
    const up = found.map((one) => `${x(one.x).toFixed(1)},${inside(one.y + one.deviation).toFixed(1)}`);
    const down = found.map((one) => `${x(one.x).toFixed(1)},${inside(one.y - one.deviation).toFixed(1)}`).reverse();
    parts.push(draw("polygon", { class: "band", points: [...up, ...down].join(" "), fill: style.stroke }));
  }
  const path = found.map((one) => `${x(one.x).toFixed(1)},${y(one.y).toFixed(1)}`).join(" ");
  parts.push(draw("polyline", { class: "curve", points: path, ...style }));
  return parts;
}

// Show a vertical line that follows the pointer or the arrow keys, and a box with the value of every method there.
function follow(host, panel, lines, box, x, y, marks) {
  if (!lines.length) { host.onpointermove = host.onkeydown = null; return; }
  const tip = make("div", { class: "tip", hidden: true, role: "status" });
  host.append(tip);
  const stops = [...new Set(lines.flatMap(({ found }) => found.map((one) => one.x)))].sort((a, b) => a - b);
  let at = -1;
  const away = () => { marks.replaceChildren(); tip.hidden = true; at = -1; };
  const go = (next) => {
    at = Math.max(0, Math.min(stops.length - 1, next));
    const there = lines.map(({ line, found }) => ({ line, point: upTo(found, stops[at]) })).filter(({ point }) => point);
    marks.replaceChildren(
      draw("line", { class: "cross", x1: x(stops[at]), x2: x(stops[at]), y1: box.top, y2: box.height - box.bottom }),
      ...there.map(({ line, point }) =>
        draw("circle", { cx: x(point.x), cy: y(point.y), r: 3.5, fill: lineStyle(line.method).stroke })),
    );
    tell(tip, panel, stops[at], there);
  };
  host.onpointermove = host.onpointerdown = (event) => {
    const place = event.clientX - host.getBoundingClientRect().left;
    const distances = stops.map((stop) => Math.abs(x(stop) - place));
    go(distances.indexOf(Math.min(...distances)));
  };
  host.onpointerleave = (event) => { if (event.pointerType === "mouse") away(); };
  host.onblur = away;
  host.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") away();
    if (step === undefined) return;
    event.preventDefault();
    go(at < 0 && step === -1 ? stops.length - 1 : at + step);
  };
}

// Return the last point of a line whose x (rounds, bytes, seconds or epsilon) is at most `place`.
function upTo(found, place) { return found.findLast((one) => one.x <= place); }

const MOST_TOLD = 24;

function tell(tip, panel, place, there) {
  const told = state.measure === "accuracy" ? percentText : number;
  const sorted = there.sort((a, b) => (state.measure === "loss" ? a.point.y - b.point.y : b.point.y - a.point.y));
  const rows = sorted.slice(0, MOST_TOLD).map(({ line, point }) => make("tr", {},
    make("td", {}, draw("svg", { viewBox: "0 0 12 10" }, draw("line", { x1: 0, x2: 12, y1: 5, y2: 5, "stroke-width": 3, ...lineStyle(line.method) }))),
    make("td", {}, data.methods[line.method].name),
    make("td", { class: "n" }, spreadText([point.y, point.deviation], told)),
    make("td", { class: "n" }, state.x === "round" && point.round === place ? "" : `round ${point.round}`),
  ));
  const head = state.x === "round" ? `round ${place}` : `${axisName(panel)}: ${number(place)}`;
  tip.replaceChildren(make("b", {}, head), make("table", { role: "presentation" }, make("tbody", {}, ...rows)));
  if (sorted.length > MOST_TOLD) tip.append(`and ${sorted.length - MOST_TOLD} more`);
  tip.hidden = false;
}

// Return a description of the chart as text, for screen readers.
function spoken(panel) {
  const ends = visible(panel).filter((line) => line.final[0] !== null).sort((a, b) => b.final[0] - a.final[0]);
  const best = ends.length ? ` The highest final accuracy is ${data.methods[ends[0].method].name}'s: ${ends[0].final[2]} %.` : "";
  return `${MEASURES[state.measure]} by ${axisName(panel)}, ${panel.title}: ${panel.lines.length} methods.${best} ` +
    "The arrow keys move from round to round; the tables have all final values.";
}

function legend() {
  const list = make("ul", { class: "legend", "aria-label": "Methods, each with a switch" });
  data.methods.forEach((method, at) => {
    const swatch = draw("svg", { viewBox: "0 0 34 12", "aria-hidden": "true" },
      draw("line", { x1: 0, x2: 34, y1: 6, y2: 6, "stroke-width": 2.5, ...lineStyle(at) }));
    const button = make("button", {
      type: "button", "aria-pressed": "true", title: method.label,
      click: () => {
        if (!state.hidden.delete(at)) state.hidden.add(at);
        button.setAttribute("aria-pressed", String(!state.hidden.has(at)));
        repaint();
      },
    }, swatch, make("span", {}, method.name));
    list.append(make("li", {}, button));
  });
  const all = (text, hide) => make("li", {}, make("button", {
    type: "button", class: "all",
    click: () => {
      state.hidden = new Set(hide ? data.methods.keys() : []);
      for (const one of list.querySelectorAll("[aria-pressed]")) one.setAttribute("aria-pressed", String(!hide));
      repaint();
    },
  }, make("span", {}, text)));
  if (data.methods.length > 3) list.append(all("show all", false), all("hide all", true));
  return list;
}

function known(axis) { return data.panels.some((panel) => panel.lines.some((line) => (line[axis] || []).some((one) => one !== null))); }

function curves() {
  const change = (name) => (value) => { state[name] = value; repaint(); };
  const axes = Object.entries(AXES).filter(([axis]) => axis === "round" || known(axis));
  const controls = make("div", { class: "controls" },
    choice("Show", Object.entries(MEASURES), state.measure, change("measure")),
    choice("over", axes, state.x, change("x")),
    tick("log scale", state.log, change("log")),
    tick("accuracy from 0 to 100 %", state.full, change("full")));
  const panels = make("div", { class: "panels" }, ...data.panels.map((panel) => {
    const host = make("div", { class: "plot", tabindex: "0", role: "group" });
    const paint = () => { host.setAttribute("aria-label", spoken(panel)); paintCurves(panel, host); };
    return make("figure", { class: "panel" }, make("h3", {}, panel.title),
      panel.note ? make("p", { class: "small" }, `data: ${panel.note}`) : null, show(host, paint));
  }));
  const told = ["Lines: mean over seeds. Bands, or for more than four methods bars beside the last round: ± sample standard deviation. A method without a line has no such value, or the value is hidden for privacy."];
  if (data.thinned) told.push(`Of longer runs, only ${data.thinned} rounds are drawn; rounds.jsonl has all rounds.`);
  return [controls, legend(), panels, make("p", { class: "small" }, told.join(" "))];
}
