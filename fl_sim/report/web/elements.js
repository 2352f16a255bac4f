// HTML and SVG elements. Text from the data is set as text and never parsed as HTML.

const data = JSON.parse(document.getElementById("data").textContent);

const SVG = (() => {
  const template = document.createElement("template");
  template.innerHTML = "<svg></svg>";
  return template.content.firstChild.namespaceURI;
})();

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Return an HTML element with attributes, event listeners (attributes whose values are functions) and children.
function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

// Return an SVG element with attributes, event listeners and children.
function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// Return a <label> with a <select>. `options`: [value, text] of each option. `change`: called with the new value.
function choice(text, options, chosen, change) {
  const select = make("select", { change: () => change(select.value) });
  for (const [value, told] of options) select.append(make("option", { value, selected: value === chosen }, told));
  return make("label", {}, text, select);
}

function tick(text, isOn, change) {
  const box = make("input", { type: "checkbox", change: () => change(box.checked) });
  box.checked = isOn;
  return make("label", {}, box, text);
}

// Styles of lines: 12 colours times 5 dash patterns. The upper bound is black, or white on a dark page.
const DASHES = ["", "9 3", "2 2", "10 3 2 3", "15 4"];

function lineStyle(method) {
  const { style } = data.methods[method];
  if (style < 0) return { stroke: "var(--ink)", "stroke-dasharray": "4 2" };
  const turn = Math.floor(style / 12);
  return { stroke: `var(--c${style % 12})`, "stroke-dasharray": DASHES[(style + turn) % 5] || null };
}

// Charts that are drawn when they scroll into view, and again when their width or their content has changed.
const views = [];
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const view = views.find((one) => one.host === target);
    view.isSeen = isIntersecting;
    if (isIntersecting && view.isStale) refresh(view);
  }
}, { rootMargin: "300px" });
const widths = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const view = views.find((one) => one.host === target);
    if (view.width !== contentRect.width) { view.width = contentRect.width; stale(view); }
  }
});

function refresh(view) { view.isStale = false; view.paint(view.host); }

function stale(view) { view.isStale = true; if (view.isSeen) refresh(view); }

function show(host, paint) {
  views.push({ host, paint, isStale: true, isSeen: false, width: null });
  seen.observe(host);
  widths.observe(host);
  return host;
}

function repaint() { views.forEach(stale); }

// Before printing, draw all charts that have not been drawn yet, in light colours.
let screenTheme;
addEventListener("beforeprint", () => {
  screenTheme = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  views.filter((view) => view.isStale).forEach(refresh);
});
addEventListener("afterprint", () => {
  if (screenTheme) document.documentElement.dataset.theme = screenTheme;
  else delete document.documentElement.dataset.theme;
});
