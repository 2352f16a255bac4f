// The interactive sections of the page, the links to all sections, and the switch between light and dark.

function live(heading, parts) {
  if (parts) document.getElementById("live").append(make("section", {}, make("h2", {}, heading), ...parts));
}

function themeSwitch() {
  const root = document.documentElement, asked = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : asked.matches);
  const button = make("button", {
    type: "button", class: "button", id: "theme",
    click: () => { root.dataset.theme = isDark() ? "light" : "dark"; told(); },
  });
  const told = () => { button.textContent = isDark() ? "Light colours" : "Dark colours"; };
  asked.addEventListener("change", told);
  told();
  return button;
}

function contents() {
  const links = [...document.querySelectorAll("main section:not(.still) > h2")].map((heading, at) => {
    heading.id = `section-${at}`;
    return make("a", { href: `#section-${at}` }, heading.firstChild.textContent.trim());
  });
  return make("nav", { "aria-label": "Sections" }, ...links, themeSwitch());
}

document.documentElement.classList.add("live");
if (data.panels.length) {
  live("Curves", curves());
  live("Final accuracy", finals());
  live("What a target took", goals());
  live("Accuracy over clients", clients());
  live("Confusion matrices", confusions());
}
document.querySelectorAll("main table:not(.confusion)").forEach((table) => { if (table.tHead) makeSortable(table); });
document.querySelectorAll(".wide").forEach((wide) => wideOnes.observe(wide));
document.querySelector("header").append(contents());
