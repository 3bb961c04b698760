// Puts the page together: views, keys of the keyboard, the key of the service.

import { key, onKeyWanted } from "./api.js";
import { Board } from "./board.js";
import { Clips } from "./clips.js";
import { Feed } from "./feed.js";
import { Playground } from "./play.js";
import { Status } from "./status.js";

const $ = (id) => document.getElementById(id);
const VIEWS = ["play", "board", "clips"];
const SINGLE_KEYS = "tidegate.single-keys";
const THEMES = { system: ["◐", "as the system"], light: ["○", "light"], dark: ["●", "dark"] };

const playground = new Playground();
const feed = new Feed();
const board = new Board(feed);
const clips = new Clips(feed);
const status = new Status(feed);

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
  if (entered && !asking) refresh(); // else what asked for it goes on by itself
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

function show() {
  const chosen = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : VIEWS[0];
  for (const name of VIEWS) $(name).hidden = name !== chosen;
  if (chosen === "clips") $("clips-link").hidden = false;
  for (const link of document.querySelectorAll("[data-view]")) {
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
  "/": () => goTo("prompt", "say"),
  d: () => goTo("deadline", "clip-deadline"),
  1: () => (location.hash = "#play"),
  2: () => (location.hash = "#board"),
  3: () => (location.hash = "#clips"),
  t: nextTheme,
  "?": () => $("help-dialog").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if (($("clips").hidden ? playground : clips).cancel()) event.preventDefault();
    return;
  }
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (!$("play").hidden) playground.submit();
    else if (!$("clips").hidden) clips.submit();
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

// To a field of the view that is shown; of the playground where that has none.
function goTo(id, idOfClips) {
  if ($("clips").hidden) location.hash = "#play";
  show();
  $($("clips").hidden ? id : idOfClips).focus();
}

// ── tools ──────────────────────────────────────────────────────────────────────────────────────

function nextTheme() {
  window.tidegateTheme.next();
  drawTheme();
}

function drawTheme() {
  const [mark, words] = THEMES[window.tidegateTheme.name];
  $("theme-button").firstElementChild.textContent = mark;
  $("theme-button").setAttribute("aria-label", `Colours: ${words}`);
  $("theme-button").title = `Colours: ${words}`;
}
$("theme-button").addEventListener("click", nextTheme);
drawTheme();
$("help-button").addEventListener("click", () => $("help-dialog").showModal());
if (/Mac|iPhone|iPad/.test(navigator.platform)) {
  for (const id of ["send", "clip-send"]) $(id).querySelector("kbd").textContent = "⌘ ⏎";
}

status.start();
