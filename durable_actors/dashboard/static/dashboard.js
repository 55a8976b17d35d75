// Live updates, keys, selection. Pages can be read without it. No dependency, no inline code: the CSP allows neither.
"use strict";

const body = document.body;
const root = body.dataset.root;
const liveButton = document.querySelector("[data-live-button]");

// -- live updates: the server rings, the page fetches itself and takes over its regions

let live = sessionStorage.getItem("live") !== "off";
let stream = null;
let fetching = false;
let again = false;

async function refresh() {
  if (fetching) { again = true; return; }
  fetching = true;
  try {
    const answer = await fetch(location.href, { headers: { "X-Live": "1" }, credentials: "same-origin" });
    if (answer.ok && !answer.redirected) takeOver(new DOMParser().parseFromString(await answer.text(), "text/html"));
  } catch { /* the server is away: the stream tries again */ } finally {
    fetching = false;
    if (again) { again = false; refresh(); }
  }
}

function takeOver(fresh) {
  for (const region of document.querySelectorAll("[data-region]")) {
    const other = fresh.getElementById(region.id);
    if (other) morph(region, other);
  }
  document.dispatchEvent(new Event("refreshed"));
}

// Change `old` into `fresh` in place. What the reader is typing, has opened, selected or ticked stays.
function morph(old, fresh) {
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !(name === "open" && old.tagName === "DETAILS") && name !== "class") old.removeAttribute(name);
  }
  const wanted = [...fresh.childNodes];
  wanted.forEach((next, index) => {
    let here = old.childNodes[index];
    if (next.id && (!here || here.id !== next.id)) {
      const known = [...old.children].find((each) => each.id === next.id);
      if (known) { bringHere(old, known, index); here = known; }
    }
    if (!here) old.appendChild(document.importNode(next, true));
    else if (here.nodeType !== next.nodeType || here.nodeName !== next.nodeName) old.replaceChild(document.importNode(next, true), here);
    else if (here.nodeType === Node.TEXT_NODE) { if (here.data !== next.data) here.data = next.data; }
    else if (here.nodeType === Node.ELEMENT_NODE && !isBeingEdited(here)) morph(here, next);
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

// Moving an element takes the focus from what is in it: then the others move.
function bringHere(parent, known, index) {
  if (!known.contains(document.activeElement)) parent.insertBefore(known, parent.childNodes[index] ?? null);
  else while (parent.childNodes[index] !== known) parent.appendChild(parent.childNodes[index]);
}

function isBeingEdited(element) {
  return element === document.activeElement && /^(INPUT|TEXTAREA|SELECT)$/.test(element.tagName);
}

function connect() {
  const want = live && "live" in body.dataset && document.visibilityState === "visible";
  if (want && !stream) {
    stream = new EventSource(`${root}/events`);
    stream.addEventListener("ring", refresh);
    stream.addEventListener("open", () => liveButton?.classList.remove("away"));
    stream.addEventListener("error", () => liveButton?.classList.add("away"));
  } else if (!want && stream) {
    stream.close();
    stream = null;
  }
  liveButton?.setAttribute("aria-pressed", String(live));
}

function toggleLive() {
  live = !live;
  sessionStorage.setItem("live", live ? "on" : "off");
  connect();
  if (live) refresh();
}

if (liveButton) {
  liveButton.hidden = false;
  liveButton.addEventListener("click", toggleLive);
}
document.addEventListener("visibilitychange", () => { connect(); if (document.visibilityState === "visible" && live && "live" in body.dataset) refresh(); });
addEventListener("pagehide", () => { stream?.close(); stream = null; });
addEventListener("pageshow", connect);

// -- times: local, with UTC on hover

function localTimes() {
  for (const each of document.querySelectorAll("time[datetime]")) {
    if (/^\d{4}-/.test(each.textContent)) each.textContent = new Date(each.dateTime).toLocaleString();
  }
}
localTimes();
document.addEventListener("refreshed", localTimes);

// -- selection of rows, and what is selected

let picked = 0;
function selected() { return [...document.querySelectorAll("input[data-pick]")]; }
function showSelection() {
  const boxes = selected();
  const count = boxes.filter((each) => each.checked).length;
  const all = document.querySelector("input[data-pick-all]");
  if (all) { all.checked = count > 0 && count === boxes.length; all.indeterminate = count > 0 && count < boxes.length; }
  for (const each of document.querySelectorAll("[data-picked]")) each.textContent = String(count);
  if (count > 0 && picked === 0) for (const each of document.querySelectorAll("[data-bulk]")) each.open = true;
  picked = count;
}
document.addEventListener("change", (event) => {
  if (event.target.matches("input[data-pick-all]")) for (const each of selected()) each.checked = event.target.checked;
  if (event.target.matches("input[data-pick], input[data-pick-all]")) showSelection();
});

// -- keys

let at = -1;
function move(step) {
  const rows = [...document.querySelectorAll("tr[data-row]")];
  if (!rows.length) return;
  rows[at]?.classList.remove("at");
  at = Math.min(Math.max(at + step, 0), rows.length - 1);
  rows[at].classList.add("at");
  rows[at].scrollIntoView({ block: "nearest" });
}
const help = document.getElementById("help");
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select, dialog")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const row = document.querySelectorAll("tr[data-row]")[at];
  const link = [...document.querySelectorAll("nav a[data-key]")].find((each) => each.dataset.key === event.key);
  if (event.key === "/") (document.getElementById("bar") ?? document.getElementById("find")).focus();
  else if (event.key === "?") help.showModal();
  else if (event.key === "j" || event.key === "k") move(event.key === "j" ? 1 : -1);
  else if (event.key === "x") row?.querySelector("input[data-pick]")?.click();
  else if (event.key === "Enter" && row && event.target === body) row.querySelector("a")?.click();
  else if (event.key === "r") toggleLive();
  else if (link) location.assign(link.href);
  else return;
  event.preventDefault();
});

// -- copying

for (const each of document.querySelectorAll("[data-copy]")) {
  each.hidden = false;
  each.addEventListener("click", () => navigator.clipboard?.writeText(each.dataset.copy));
}

// On a phone the navigation scrolls: show where one is.
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

connect();
showSelection();
