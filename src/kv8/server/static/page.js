// Asks the server every two seconds what its cache does, and shows it.

import { byId, setText } from "./dom.js";
import * as figures from "./figures.js";
import { HeatMap } from "./heatmap.js";
import { Rates } from "./rates.js";

const EVERY = 2000; // milliseconds
const PATIENCE = 20000;
const KEY = "kv8-api-key";

const map = new HeatMap(byId("map"), byId("readout"), byId("legend"));
const rates = new Rates();
let answeredAt = null;
let timer = null;
let asking = false;

async function ask() {
  if (asking || document.hidden) return;
  asking = true;
  clearTimeout(timer);
  try {
    const answer = await request();
    if (answer.status === 401) lock();
    else if (answer.ok) show(await answer.json());
    else notice(`The server answered ${answer.status}: ${await reason(answer)}`, "bad");
  } catch (error) {
    unreachable(error);
  } finally {
    asking = false;
    timer = setTimeout(ask, EVERY);
  }
}

function request() {
  const key = sessionStorage.getItem(KEY);
  return fetch("v1/kv_cache", {
    headers: key ? { Authorization: `Bearer ${key}` } : {},
    cache: "no-store",
    signal: AbortSignal.timeout(PATIENCE),
  });
}

function show(data) {
  answeredAt = new Date();
  byId("lock").hidden = true;
  document.body.dataset.view = "shown";
  rates.add(data);
  figures.showHeader(data);
  figures.showUse(data);
  figures.showSpeed(rates);
  figures.showClipped(data);
  figures.showWork(data, rates);
  figures.showCache(data);
  figures.showSettings(data);
  figures.showExample(data);
  map.update(data);
  notice(explain(data), data.state === "failed" ? "bad" : "wait");
}

function explain(data) {
  if (data.state === "loading") return "The weights are being read. Below is what is planned.";
  if (data.state === "draining") return "The server is stopping: it finishes what it has accepted.";
  if (data.state === "failed") return `The engine has failed: ${data.failure ?? "no reason given"}`;
  return "";
}

function lock() {
  const form = byId("lock");
  const refused = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  figures.showState("locked");
  notice(refused ? "The server refused that key." : "");
  if (!form.hidden) return;
  form.hidden = false;
  byId("key").focus();
}

function unreachable(error) {
  figures.showState("no answer");
  const late = error.name === "TimeoutError";
  const what = late ? "The server has not answered for 20 s." : "The server cannot be reached.";
  const since = answeredAt ? ` The numbers below are of ${answeredAt.toLocaleTimeString()}.` : "";
  notice(what + since, "bad");
}

function notice(text, kind = "wait") {
  setText("notice", text);
  byId("notice").hidden = text === "";
  byId("notice").dataset.kind = kind;
}

async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return answer.statusText;
  }
}

byId("lock").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  ask();
});
document.addEventListener("visibilitychange", () => ask());
ask();
