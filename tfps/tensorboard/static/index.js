// The "Parameter servers" tab: controls, one pane per run, and what tests look at (window.tfps).

import { legend } from "./colors.js";
import { detailsPanel } from "./details.js";
import { el, load } from "./dom.js";
import { summaryPanel } from "./summary.js";
import { themeOf, watchTheme } from "./theme.js";
import { Timeline, Viewport } from "./timeline.js";
import { Trace } from "./trace.js";

const NONE = "";

/** Called by TensorBoard once the module is there. */
export async function render() {
  document.head.append(el("link", { rel: "stylesheet", href: new URL("style.css", import.meta.url) }));
  document.title = "Parameter servers";
  document.documentElement.lang = "en";
  const page = new Page();
  window.tfps = page;
  document.body.replaceChildren(page.root);
  await page.start();
}

class Page {
  panes = [];
  viewport = new Viewport();
  firstPaintMs = null; // since the tab began to load
  state = "loading";

  constructor() {
    const change = () => this.show(this.run.value, this.other.value);
    const renew = () => this.list();
    this.run = el("select", { onchange: change, onpointerdown: renew, onfocus: renew });
    this.other = el("select", { onchange: change, onpointerdown: renew, onfocus: renew });
    this.color = el("select", { onchange: () => this.restyle() }, el("option", { value: "kind" }, "kind"), el("option", { value: "layer" }, "layer order"));
    this.find = el("input", {
      type: "search", placeholder: "variable", oninput: () => this.search(this.find.value),
      onkeydown: (event) => {
        if (event.key === "Enter") this.next(event.shiftKey ? -1 : 1);
        if (event.key === "Escape") this.search((this.find.value = ""));
      },
    });
    this.found = el("output", { "aria-live": "polite" });
    this.theme = el("select", { onchange: () => this.restyle() }, ...["auto", "light", "dark"].map((name) => el("option", {}, name)));
    this.legend = el("div", { class: "legend" });
    this.live = el("div", { class: "hidden", "aria-live": "polite" });
    this.message = el("p", { class: "message", role: "status" }, "Loading…");
    this.body = el("main", { class: "panes" });
    const button = (text, title, act) => el("button", { title, "aria-label": title, onclick: act }, text);
    this.root = el("div", { class: "page" },
      el("header", {},
        el("label", {}, "run ", this.run), el("label", {}, "compare with ", this.other), el("label", {}, "colour by ", this.color),
        el("label", {}, "search ", this.find), this.found,
        el("span", { class: "zoom" },
          button("−", "zoom out", () => this.viewport.zoom(1 / 0.6)), button("+", "zoom in", () => this.viewport.zoom(0.6)),
          button("fit", "show everything", () => this.viewport.fit())),
        el("label", {}, "theme ", this.theme)),
      this.legend, this.message, this.body, this.live,
      el("footer", {}, "drag or ←→: pan · Ctrl+wheel or +−: zoom · double click or Enter: zoom to · click: follow a slice · n p j k: next span, next lane · f: only its lanes · 0: all · /: search"));
    document.addEventListener("keydown", (event) => {
      if (event.key === "/" && event.target !== this.find) {
        event.preventDefault();
        this.find.focus();
      }
    });
    watchTheme(() => this.restyle());
  }

  async start() {
    try {
      const runs = await this.list();
      if (!runs.length) {
        this.fail("There is no capture here: no plugins/tfps/*.trace.json.gz in any folder below the log directory.");
        return;
      }
      await this.show(runs[0], NONE);
    } catch (error) {
      this.fail(String(error.message ?? error));
    }
  }

  /** What can be chosen: the captures that there are now. Those on the lists stay. */
  async list() {
    const runs = await load("runs");
    if (!this.other.length) this.other.append(el("option", { value: NONE }, "nothing"));
    for (const menu of [this.run, this.other]) {
      const there = new Set([...menu.options].map((option) => option.value));
      menu.append(...runs.filter((run) => !there.has(run)).map((run) => el("option", { value: run }, run)));
    }
    return runs;
  }

  fail(text) {
    this.message.hidden = false;
    this.message.textContent = text;
    this.state = "failed";
  }

  /** Shows one run, or two beside each other: timelines first, summaries when they are computed. */
  async show(run, other) {
    this.state = "loading";
    this.run.value = run;
    this.other.value = other;
    const names = other === NONE ? [run] : [run, other];
    try {
      const traces = await Promise.all(names.map(async (name) => new Trace(await load("capture", { run: name }))));
      if (this.run.value !== run || this.other.value !== other) return;
      for (const pane of this.panes) pane.timeline.close();
      this.message.hidden = true;
      this.panes = traces.map((trace, number) => this.makePane(names[number], trace));
      this.body.replaceChildren(...this.panes.map((pane) => pane.root));
      this.body.classList.toggle("two", this.panes.length > 1);
      const whole = [Math.min(...traces.map((one) => -one.first)), Math.max(...traces.map((one) => one.last - one.first))];
      const steps = Math.max(...traces.map((one) => (one.steps.at(-1)?.end ?? one.last) - one.first));
      this.viewport.cover(whole, [-0.01 * steps, 1.01 * steps]);
      this.restyle();
      for (const pane of this.panes) pane.timeline.resize();
      requestAnimationFrame(() => requestAnimationFrame(() => this.painted()));
      const panes = this.panes;
      const summaries = await Promise.all(names.map((name) => load("summary", { run: name })));
      if (panes !== this.panes) return;
      panes.forEach((pane, number) => {
        pane.summary = summaries[number];
        pane.head.replaceChildren(summaryPanel(summaries[number], number ? summaries[0] : null, names.length > 1, (name) => this.search((this.find.value = name)),
          (change) => pane.timeline.select(pane.trace.changes[change], true)));
      });
      this.state = "ready";
    } catch (error) {
      if (this.run.value !== run || this.other.value !== other) return; // something else is shown, or on its way
      this.fail(String(error.message ?? error));
      for (const pane of this.panes.filter(({ summary }) => !summary)) {
        pane.head.replaceChildren(el("p", { class: "message", role: "alert" }, "There is no summary: the request for it failed. Reload the page to try again."));
      }
    }
  }

  painted() {
    this.firstPaintMs ??= performance.now();
    if (this.state === "loading") this.state = "painted";
  }

  makePane(name, trace) {
    const head = el("div", { class: "head" }, el("p", { class: "message" }, "Computing the summary…"));
    const below = el("div", { class: "below" });
    const timeline = new Timeline(trace, {
      viewport: this.viewport,
      theme: () => themeOf(this.theme.value),
      colorBy: () => this.color.value,
      onSelect: (span) => {
        below.replaceChildren(...(span < 0 ? [] : [detailsPanel(timeline)]));
        if (span >= 0) head.querySelector("details")?.removeAttribute("open"); // room for the timeline
        this.live.textContent = span < 0 ? "" : timeline.describe(span);
      },
    });
    const settings = Object.entries(trace.settings).map(([key, value]) => `${key} ${value}`).join(" · ");
    const root = el("article", { class: "pane", "aria-label": name },
      el("div", { class: "title" }, el("h1", {}, name), el("span", {}, `${trace.count.toLocaleString("en")} spans · ${settings}`)),
      head, timeline.root, below);
    return { name, trace, timeline, head, below, root, summary: null };
  }

  restyle() {
    document.documentElement.dataset.theme = themeOf(this.theme.value).dark ? "dark" : "light";
    for (const { timeline } of this.panes) timeline.restyle();
    if (!this.panes.length) return;
    const entries = legend(this.panes[0].trace, this.color.value, themeOf(this.theme.value).dark);
    this.legend.replaceChildren(...entries.map(([color, words]) => el("span", {}, el("i", { style: `background:${color}` }), words)));
  }

  search(text) {
    let count = 0;
    for (const { timeline, trace } of this.panes) {
      const found = trace.search(text);
      count = Math.max(count, [...found].reduce((sum, bucket) => sum + Math.max(matching(trace.buckets[bucket], text), 1), 0));
      timeline.selected < 0 || timeline.select(-1);
      timeline.mark(found);
    }
    this.found.textContent = text.trim() ? (count === 1 ? "1 variable" : `${count} variables`) : "";
  }

  /** Selects the next message or wait of what was searched for. */
  next(by) {
    const [{ timeline, trace }] = this.panes;
    if (!timeline.marked?.size) return;
    const wanted = (span) => timeline.marked.has(trace.bucket[span]) && ["gate", "lookup", "wire"].includes(trace.kindOf(span));
    let span = timeline.selected;
    for (let tries = 0; tries < trace.count; tries++) {
      span = (span + by + trace.count) % trace.count;
      if (wanted(span)) return timeline.select(span, true);
    }
  }
}

function matching(bucket, text) {
  const wanted = text.trim().toLowerCase();
  return bucket.variables.filter((name) => name.toLowerCase().includes(wanted)).length;
}
