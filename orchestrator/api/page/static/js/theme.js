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
  const apply = (name) => {
    chosen = names.includes(name) ? name : "system";
    if (chosen === "system") delete root.dataset.theme;
    else root.dataset.theme = chosen;
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
      document.dispatchEvent(new Event("themechange"));
      return chosen;
    },
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    document.dispatchEvent(new Event("themechange")),
  );
})();
