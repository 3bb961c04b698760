// Puts the page together: views, keys of the keyboard, the key of the service.

import { key, onKeyWanted } from "./api.js";
import { Board } from "./board.js";
import { Feed } from "./feed.js";
import { Playground } from "./play.js";
import { Status } from "./status.js";

const $ = (id) => document.getElementById(id);
const SINGLE_KEYS = "tidegate.single-keys";
const THEMES = { system: ["◐", "as the system"], light: ["○", "light"], dark: ["●", "dark"] };

const playground = new Playground();
const feed = new Feed();
const board = new Board(feed);
const status = new Status(feed);
const views = new Map([["play", playground], ["board", board]]);
for (const section of document.querySelectorAll("section[data-module]")) {
  const { View, Card } = await import(section.dataset.module);
  const link = Object.assign(document.createElement("a"), { href: `#${section.id}`, id: `${section.id}-link` });
  link.textContent = section.getAttribute("aria-label");
  link.dataset.view = section.id;
  link.hidden = true; // until its view has something to show
  document.querySelector("header nav").append(link);
  board.cards.push(Card);
  views.set(section.id, new View(feed));
}

// ── the service's key ──────────────────────────────────────────────────────────────────────────

// An address that `tidegate up` prints has the operators' key behind its "#"; it does not stay there.
function takeKey() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!given) return;
  key.set(given);
  history.replaceState(null, "", location.pathname);
  $("key-button").hidden = false;
}

let asking = null;
onKeyWanted((error, used) => {
  // Somebody else has asked meanwhile, and got one.
  if (key.get() !== used) return Promise.resolve(true);
  asking ??= askForKey(error, used).finally(() => (asking = null));
  return asking;
});

function askForKey(error, used) {
  const kept = "It is kept in this tab only, and sent to this service only.";
  $("key-why").textContent = used || error.details.field ? `${error.message}. ${kept}` : kept;
  $("key").value = "";
  $("key-button").hidden = false;
  const dialog = $("key-dialog");
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) =>
    dialog.addEventListener("close", () => resolve(key.get() !== used && key.get() !== ""), { once: true }),
  );
}

let entered = false;
$("key-form").addEventListener("submit", () => {
  key.set($("key").value.trim());
  entered = true;
});
$("key-forget").addEventListener("click", () => {
  key.set("");
  $("key-dialog").close();
});
$("key-button").addEventListener("click", () => $("key-dialog").showModal());
$("key-dialog").addEventListener("close", () => {
  if (entered && !asking) refresh(); // else its caller continues
  entered = false;
});
$("key-button").hidden = key.get() === "";

function refresh() {
  if (status.state === "unreachable") return;
  playground.refresh().then(watch, () => {});
}

// Nobody looks at a hidden page: then the service need not tell it anything.
function watch() {
  if (document.hidden) feed.stop();
  else feed.start();
}
document.addEventListener("visibilitychange", watch);
status.addEventListener("change", refresh);

// ── views ──────────────────────────────────────────────────────────────────────────────────────

// The view that is shown.
function shown() {
  return [...views.keys()].find((name) => !$(name).hidden);
}

function show() {
  const chosen = views.has(location.hash.slice(1)) ? location.hash.slice(1) : "play";
  for (const name of views.keys()) $(name).hidden = name !== chosen;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === chosen) link.hidden = false;
    if (link.dataset.view === chosen) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  board.draw();
}
addEventListener("hashchange", () => {
  takeKey();
  show();
  scrollTo(0, 0);
});
takeKey();
show();

// ── keyboard ───────────────────────────────────────────────────────────────────────────────────

const singleKeys = {
  get on() {
    return localStorage.getItem(SINGLE_KEYS) !== "off";
  },
  set on(on) {
    localStorage.setItem(SINGLE_KEYS, on ? "on" : "off");
  },
};
$("single-keys").checked = singleKeys.on;
$("single-keys").addEventListener("change", () => (singleKeys.on = $("single-keys").checked));

const SHORTCUTS = {
  "/": () => goTo("prompt", "text"),
  d: () => goTo("deadline", "deadline"),
  ...Object.fromEntries([...views.keys()].map((name, at) => [at + 1, () => (location.hash = `#${name}`)])),
  t: nextTheme,
  "?": () => $("help-dialog").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    const view = views.get(shown());
    if ((view.cancel ? view : playground).cancel()) event.preventDefault();
    return;
  }
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    views.get(shown()).submit?.();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || !singleKeys.on) return;
  if (event.target.matches("textarea, select, input:not([type=range], [type=radio], [type=checkbox])")) return;
  const act = SHORTCUTS[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});

// To a field of the view that is shown; of the playground where that has none. A room's view names its
// own fields: `data-text`, `data-deadline`.
function goTo(id, field) {
  const own = $(shown()).dataset[field];
  if (!own) location.hash = "#play";
  show();
  $(own ?? id).focus();
}

// ── tools ──────────────────────────────────────────────────────────────────────────────────────

function nextTheme() {
  window.tidegateTheme.next();
  drawTheme();
}

function drawTheme() {
  const [mark, words] = THEMES[window.tidegateTheme.name];
  $("theme-button").firstElementChild.textContent = mark;
  $("theme-button").setAttribute("aria-label", `Colors: ${words}`);
  $("theme-button").title = `Colors: ${words}`;
}
$("theme-button").addEventListener("click", nextTheme);
drawTheme();
$("help-button").addEventListener("click", () => $("help-dialog").showModal());
if (/Mac|iPhone|iPad/.test(navigator.platform)) {
  for (const kbd of document.querySelectorAll("button.primary kbd")) kbd.textContent = "⌘ ⏎";
}

status.start();
