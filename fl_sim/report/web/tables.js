// Tables that are sorted by a click on a heading. Missing values come last, and upper bounds below all other rows.

function cellValue(row, column) {
  const text = (row.cells[column]?.textContent ?? "").trim();
  const found = /^[-+]?\d[\d.,]*(e[-+]?\d+)?/.exec(text);
  if (found) return Number(found[0].replace(/,/g, ""));
  return /^(-( .*)?|failed|not told|)$/.test(text) ? null : text.toLowerCase();
}

function compare(a, b, sign) {
  if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1;
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}

function sortBy(table, head, column) {
  const isDown = head.getAttribute("aria-sort") === "ascending" || (head.getAttribute("aria-sort") === null && head.classList.contains("n"));
  const down = head.getAttribute("aria-sort") === "descending" ? false : isDown;
  for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const body = table.tBodies[0], bound = (row) => (row.classList.contains("bound") ? 1 : 0);
  const rows = [...body.rows].map((row) => ({ row, value: cellValue(row, column) }));
  rows.sort((a, b) => bound(a.row) - bound(b.row) || compare(a.value, b.value, down ? -1 : 1));
  body.append(...rows.map(({ row }) => row));
}

// A table that is wider than the page can be focused with the keyboard, so that the arrow keys scroll it.
const wideOnes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    target.classList.toggle("scrolls", target.scrollWidth > target.clientWidth);
    if (target.scrollWidth > target.clientWidth) {
      target.tabIndex = 0;
      target.setAttribute("role", "group");
      target.setAttribute("aria-label", "Table, wider than the page");
    } else {
      for (const name of ["tabindex", "role", "aria-label"]) target.removeAttribute(name);
    }
  }
});

function makeSortable(table) {
  [...table.tHead.rows].at(-1).querySelectorAll("th").forEach((head, column) => {
    const text = head.textContent;
    head.replaceChildren(make("button", { type: "button", title: "sort by this column", click: () => sortBy(table, head, column) }, text));
  });
}
