// Before anything is drawn, so that no page flashes in the other colours. No module for that reason.
"use strict";
(() => {
  const root = document.documentElement;
  const names = ["system", "light", "dark"];
  let chosen = "system";
  try {
    chosen = localStorage.getItem("tidegate.theme") || "system";
  } catch {
    // Storage is forbidden: the system's colours it is.
  }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = (name) => {
    chosen = names.includes(name) ? name : "system";
    root.dataset.theme = chosen === "system" ? (dark.matches ? "dark" : "light") : chosen;
    document.dispatchEvent(new Event("themechange"));
  };
  apply(chosen);
  window.tidegateTheme = {
    get name() {
      return chosen;
    },
    next() {
      apply(names[(names.indexOf(chosen) + 1) % names.length]);
      try {
        localStorage.setItem("tidegate.theme", chosen);
      } catch {
        // It holds for this page then.
      }
      return chosen;
    },
  };
  dark.addEventListener("change", () => apply(chosen));
})();
