// One capture's timeline: lanes and where they are, what is seen of it, what is selected.

import { colorOf, KIND_WORDS, palette } from "./colors.js";
import { el, time, bytes } from "./dom.js";
import { AXIS, drawTimeline, firstAfter } from "./draw.js";
import { listen } from "./input.js";

const GUTTER_ROW = 20;
const DEEP = 64; // rows; lanes with more show only how many spans there are
const MANY_LANES = 60;
const OVERVIEW = ["compute", "gates", "to worker 0"]; // what a closed process shows
const NEAR = 3; // pixels

/** What part of the time is seen, from the first step's begin; shared by two timelines that are compared. */
export class Viewport extends EventTarget {
  left = 0;
  right = 1;
  whole = [0, 1];

  /** What there is, and what is shown of it at first. */
  cover(whole, shown) {
    this.whole = whole;
    this.usual = shown;
    this.show(...shown);
  }

  fit() {
    this.show(...this.usual);
  }

  show(left, right) {
    const [first, last] = this.whole;
    const wide = Math.min(Math.max(right - left, 2000), (last - first) * 1.1);
    const middle = Math.min(Math.max((left + right) / 2, first), last);
    this.left = middle - wide / 2;
    this.right = middle + wide / 2;
    this.dispatchEvent(new Event("change"));
  }

  /** Makes the seen part `factor` times as wide; what is at `part` of it stays where it is. */
  zoom(factor, part = 0.5) {
    const wide = this.right - this.left;
    const fixed = this.left + part * wide;
    this.show(fixed - part * wide * factor, fixed + (1 - part) * wide * factor);
  }

  pan(part) {
    const by = part * (this.right - this.left);
    this.show(this.left + by, this.right + by);
  }
}

export class Timeline {
  selected = -1;
  hovered = -1;
  followed = [];
  highlighted = null;
  focus = false;
  frames = 0;
  #queued = false;

  /** @param options viewport, theme(), colorBy(), onSelect(span or -1) */
  constructor(trace, options) {
    this.trace = trace;
    this.options = options;
    this.closed = new Set();
    this.expanded = new Set();
    if (trace.lanes.length > MANY_LANES) {
      const open = [trace.processes.findIndex((one) => one.role === "worker"), trace.processes.findIndex((one) => one.role === "pserver")];
      trace.processes.forEach((_, number) => open.includes(number) || this.closed.add(number));
    }
    this.labels = el("div", { class: "labels" });
    this.canvas = el("canvas", {
      tabindex: 0, role: "application",
      "aria-label": `timeline of ${trace.name}: arrows pan, plus and minus zoom, n and p go through the spans of a lane, j and k through lanes`,
    });
    this.tip = el("div", { class: "tip", hidden: true });
    this.scroller = el("div", { class: "scroller", tabindex: -1 }, this.labels, el("div", { class: "stage" }, this.canvas));
    this.root = el("div", { class: "timeline" }, this.scroller, this.tip);
    this.context = this.canvas.getContext("2d");
    this.redraw = () => this.draw();
    options.viewport.addEventListener("change", this.redraw);
    this.scroller.addEventListener("scroll", this.redraw);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.scroller);
    listen(this);
    this.restyle();
    this.layout();
  }

  close() {
    this.options.viewport.removeEventListener("change", this.redraw);
    this.observer.disconnect();
  }

  restyle() {
    this.theme = this.options.theme();
    this.palette = palette(this.trace, this.options.colorBy(), this.theme.dark);
    this.colorOfChanges = colorOf("change", this.theme.dark);
    this.draw();
  }

  // Time to pixels

  get left() {
    return this.options.viewport.left + this.trace.first;
  }

  get right() {
    return this.options.viewport.right + this.trace.first;
  }

  get pixelsPerNs() {
    return this.width / (this.right - this.left);
  }

  xOf(time) {
    return (time - this.left) * this.pixelsPerNs;
  }

  /** Where a span is drawn, from the canvas's corner. */
  rectOf(span) {
    const lane = this.trace.lane[span];
    const place = this.places.get(lane);
    const header = this.headers.get(lane.process) ?? { top: -1000, height: 0 };
    const x = this.xOf(this.trace.begin[span]);
    const width = (this.trace.end[span] - this.trace.begin[span]) * this.pixelsPerNs;
    const collapsed = !place;
    const y = (collapsed ? header.top + 4 : place.top + this.trace.row[span] * place.rowHeight) + AXIS - this.scroller.scrollTop;
    const height = collapsed ? header.height - 8 : Math.max(place.rowHeight - (place.rowHeight > 3 ? 1 : 0), 0.7);
    const shown = x + width >= 0 && x <= this.width && y + height >= AXIS && y <= this.height;
    return { x, y, width, height, shown, collapsed };
  }

  /** The span under a point of the canvas, or the nearest within some pixels, or the change whose line is there, or -1. */
  spanAt(x, y) {
    const found = this.#inLanes(x, y);
    const away = (span) => Math.abs(this.xOf(this.trace.begin[span]) - x);
    return found >= 0 ? found : this.trace.changes.find((span) => away(span) <= NEAR) ?? -1;
  }

  #inLanes(x, y) {
    const down = y - AXIS + this.scroller.scrollTop;
    if (y < AXIS) return -1;
    for (const place of this.places.values()) {
      if (down < place.top || down >= place.top + place.height) continue;
      const row = Math.min(Math.floor((down - place.top) / place.rowHeight), place.lane.rows.length - 1);
      const around = [...Array(place.lane.rows.length > 3 && place.rowHeight < 3 ? 3 : 1).keys()].map((by) => row - by);
      for (const one of around) {
        const found = one < 0 ? -1 : this.#inRow(place.lane, one, x);
        if (found >= 0) return found;
      }
    }
    return -1;
  }

  #inRow(lane, row, x) {
    const { trace } = this;
    const [from, to] = [row ? lane.rows[row - 1] : 0, lane.rows[row]];
    const [early, late] = [x - NEAR, x + NEAR].map((at) => this.left + at / this.pixelsPerNs);
    const wanted = this.left + x / this.pixelsPerNs;
    let best = -1;
    let distance = Infinity;
    for (let at = firstAfter(trace, lane.packed, from, to, early); at < to && at < from + 1e9; at++) {
      const span = lane.packed[at];
      if (trace.begin[span] > late) break;
      const away = Math.max(trace.begin[span] - wanted, wanted - trace.end[span], 0);
      if (away < distance) [best, distance] = [span, away];
      if (!away) break;
    }
    return best;
  }

  // Lanes

  layout() {
    const items = [];
    // With `focus` only lanes of the selected slice are there, and what is computed meanwhile.
    const wanted = this.focus && this.followed.length ? new Set(this.followed.map((span) => this.trace.lane[span])) : null;
    this.places = new Map();
    this.headers = new Map();
    let top = 0;
    this.trace.processes.forEach((process, number) => {
      const lanes = this.trace.lanes.filter((lane) => lane.process === number && this.#isShown(lane, wanted));
      if (!lanes.length) return;
      const open = wanted !== null || !this.closed.has(number);
      const overview = open ? [] : lanes.filter((lane) => OVERVIEW.includes(lane.name) && lane.rows.length <= DEEP);
      this.headers.set(number, { header: true, top, height: GUTTER_ROW, overview });
      items.push(el("button", {
        class: "group", style: `top:${top + AXIS}px`, "aria-expanded": String(open), title: describe(process),
        onclick: () => this.#toggle(this.closed, number),
      }, `${open ? "▾" : "▸"} ${process.name}`, el("span", {}, process.host)));
      top += GUTTER_ROW;
      for (const lane of open ? lanes : []) {
        const height = wanted ? Math.min(14 * lane.rows.length, 30) : laneHeight(lane.rows.length, this.expanded.has(lane));
        const rowHeight = height / lane.rows.length;
        this.places.set(lane, { lane, top, height, rowHeight, deep: lane.rows.length > DEEP && rowHeight < 2 });
        const grows = lane.rows.length > 3;
        items.push(el(grows ? "button" : "div", {
          class: "lane", style: `top:${top + AXIS}px;height:${height}px`,
          title: grows ? `${lane.rows.length} at once; click to ${this.expanded.has(lane) ? "shrink" : "enlarge"}` : null,
          onclick: grows ? () => this.#toggle(this.expanded, lane) : () => {},
        }, lane.name));
        top += height + 2;
      }
      top += 4;
    });
    this.labels.replaceChildren(...items);
    this.labels.style.height = `${top + AXIS}px`;
    this.draw();
  }

  #isShown(lane, wanted) {
    if (wanted === null) return true;
    const here = [...wanted].some((other) => other.process === lane.process);
    return wanted.has(lane) || (here && (lane.name === "compute" || lane.name === "gates"));
  }

  /** Only the lanes of the selected slice, or all. */
  setFocus(on) {
    this.focus = on;
    this.onFocus?.();
    this.layout();
    if (this.selected >= 0) this.reveal(this.selected);
  }

  #toggle(set, key) {
    if (!set.delete(key)) set.add(key);
    this.layout();
  }

  *visibleLanes() {
    const shift = AXIS - this.scroller.scrollTop;
    for (const place of [...this.headers.values(), ...this.places.values()]) {
      const y = place.top + shift;
      if (y < this.height && y + place.height > AXIS) yield { ...place, y };
    }
  }

  resize() {
    const width = this.scroller.clientWidth - this.labels.offsetWidth;
    const height = this.scroller.clientHeight;
    if (width <= 0 || height <= 0) return;
    const ratio = window.devicePixelRatio || 1;
    [this.width, this.height] = [width, height];
    [this.canvas.width, this.canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    drawTimeline(this.context, this);
  }

  /** Draws in the next frame. */
  draw() {
    if (this.#queued) return;
    this.#queued = true;
    requestAnimationFrame(() => {
      this.#queued = false;
      if (!this.width) return this.resize();
      const from = performance.now();
      drawTimeline(this.context, this);
      this.frameMs = performance.now() - from;
      this.frames++;
    });
  }

  // Selection

  /** Selects a span (-1: none) and shows where its slice went; `reveal` scrolls to it. */
  select(span, reveal = false) {
    this.selected = span;
    this.followed = span < 0 ? [] : this.trace.follow(span);
    this.#highlight();
    if (this.focus) this.setFocus(span >= 0);
    if (reveal && span >= 0) this.reveal(span);
    this.options.onSelect(span);
    this.draw();
  }

  /** Highlights everything of some buckets. */
  mark(buckets) {
    this.marked = buckets;
    this.#highlight();
    this.draw();
  }

  #highlight() {
    const { trace, marked } = this;
    this.highlighted = this.highlightedLanes = null;
    if (this.followed.length > 1) this.highlighted = this.followed;
    else if (marked?.size) {
      const wanted = new Uint8Array(trace.buckets.length);
      for (const bucket of marked) wanted[bucket] = 1;
      const chosen = (span) => trace.bucket[span] >= 0 && wanted[trace.bucket[span]] === 1;
      this.highlighted = Int32Array.from({ length: trace.count }, (_, span) => span).filter(chosen);
      this.highlightedLanes = new Map(trace.lanes.map((lane) => [lane, part(lane, chosen)]));
    }
  }

  reveal(span) {
    const { viewport } = this.options;
    const lane = this.trace.lane[span];
    if (this.closed.has(lane.process)) this.#toggle(this.closed, lane.process);
    const [begin, end] = [this.trace.begin[span], this.trace.end[span]].map((at) => at - this.trace.first);
    if (end < viewport.left || begin > viewport.right) {
      const half = (viewport.right - viewport.left) / 2;
      viewport.show((begin + end) / 2 - half, (begin + end) / 2 + half);
    }
    const place = this.places.get(lane);
    if (!place) return;
    const down = place.top - this.scroller.scrollTop;
    if (down < 0 || down + place.height > this.height - AXIS) this.scroller.scrollTop = place.top - this.height / 3;
  }

  /** The next (1) or previous (-1) span of the selected one's lane; without one the first that is seen. */
  neighbour(by) {
    const { trace } = this;
    if (this.selected < 0) {
      const [lane] = [...this.visibleLanes()].filter((place) => place.lane && !["steps", "view"].includes(place.lane.name));
      return lane ? [...lane.lane.spans].find((span) => trace.end[span] >= this.left) ?? -1 : -1;
    }
    const { spans } = trace.lane[this.selected];
    const at = spans.indexOf(this.selected) + by;
    return spans[Math.min(Math.max(at, 0), spans.length - 1)];
  }

  /** What another lane (1 below, -1 above) does at the time of the selected span. */
  across(by) {
    if (this.selected < 0) return this.neighbour(1);
    const lanes = [...this.places.keys()];
    const lane = lanes[Math.min(Math.max(lanes.indexOf(this.trace.lane[this.selected]) + by, 0), lanes.length - 1)];
    const wanted = this.trace.begin[this.selected];
    return [...lane.spans].find((span) => this.trace.end[span] > wanted) ?? lane.spans[lane.spans.length - 1];
  }

  labelOf(span) {
    const { trace } = this;
    const kind = trace.kindOf(span);
    if (kind === "step") return `step ${trace.step[span]}`;
    if (kind === "change") return `generation ${trace.viewOf(span).generation}: ${trace.viewOf(span).reason}`;
    return trace.subjectOf(span) || kind;
  }

  /** A span in one line. */
  describe(span) {
    const { trace } = this;
    const kind = trace.kindOf(span);
    if (kind === "change") {
      const { note } = trace.viewOf(span);
      return [this.labelOf(span), trace.presentAfter(span), ...(note ? [note] : [])].join(" · ");
    }
    const parts = [`${KIND_WORDS[kind] ?? kind}${kind === "step" ? "" : ` ${this.labelOf(span)}`}`];
    if (trace.end[span] > trace.begin[span]) parts.push(time(trace.end[span] - trace.begin[span]));
    if (trace.nbytes[span] >= 0) parts.push(bytes(trace.nbytes[span]));
    if (trace.step[span] >= 0) parts.push(`step ${trace.step[span]}`);
    if (kind === "aggregate" && trace.rank[span] >= 0) parts.push(`waited for worker ${trace.rank[span]}`);
    return [...parts, trace.processOf(span).name].join(" · ");
  }

  zoomTo(span) {
    const [begin, end] = [this.trace.begin[span], this.trace.end[span]].map((at) => at - this.trace.first);
    const room = Math.max(end - begin, 1000) / 2;
    this.options.viewport.show(begin - room, end + room);
  }
}

/** The rows of a lane with only some of its spans. */
function part(lane, chosen) {
  const ends = [];
  const packed = [];
  let at = 0;
  for (const end of lane.rows) {
    for (; at < end; at++) if (chosen(lane.packed[at])) packed.push(lane.packed[at]);
    ends.push(packed.length);
  }
  return { packed, rows: ends };
}

function laneHeight(rows, expanded) {
  if (rows <= 2) return 14 * rows;
  if (expanded) return Math.min(rows * 13, 600);
  return Math.min(Math.max(rows * 4, 28), 72);
}

function describe(process) {
  const error = process.clock_error_ns ? `; its clock is aligned to within ${time(process.clock_error_ns)}` : "";
  return `${process.name} on ${process.host || "an unknown host"}${error}`;
}
