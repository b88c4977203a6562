// Draws a timeline on a canvas. What is narrower than a pixel is skipped by search, not looped over: a frame costs
// the number of pixels, not the number of spans.

export const AXIS = 22;
const FLOW = ["ready", "queued", "wire", "held", "aggregate", "reply_queued", "reply_wire", "update", "gate", "lookup"];
const LABEL_PIXELS = 46;
const MAX_LABELS = 400;
const CHANGE_ROW = 16;
const MAX_CHANGE = 60; // characters of a label

/** Position in `packed` of the first span of a row that ends after a time; the row is packed[from..to). */
export function firstAfter(trace, packed, from, to, time) {
  let [low, high] = [from, to];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (trace.end[packed[middle]] > time || trace.begin[packed[middle]] >= time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** How many of ascending numbers are at most a limit. */
function countUntil(numbers, limit) {
  let [low, high] = [0, numbers.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

export function drawTimeline(context, view) {
  const { width, height, theme } = view;
  context.clearRect(0, 0, width, height);
  context.fillStyle = theme.background;
  context.fillRect(0, 0, width, height);
  context.save();
  context.beginPath();
  context.rect(0, AXIS, width, height - AXIS);
  context.clip();
  const batches = view.palette.colors.map(() => []);
  const labels = [];
  for (const place of view.visibleLanes()) {
    if (place.header) {
      context.fillStyle = theme.header;
      context.fillRect(0, place.y, width, place.height);
      for (const lane of place.overview) {
        collectLane(view, { lane, y: place.y + 5, rowHeight: (place.height - 10) / lane.rows.length }, batches, []);
      }
    } else if (place.deep) drawDepth(context, view, place);
    else collectLane(view, place, batches, labels);
  }
  fill(context, view, batches);
  drawLabels(context, view, labels);
  if (view.highlighted) drawHighlighted(context, view);
  drawSteps(context, view);
  drawChanges(context, view);
  if (view.followed.length) drawFlow(context, view);
  if (view.selected >= 0) outline(context, view, view.selected, theme.text, 2);
  if (view.hovered >= 0) outline(context, view, view.hovered, theme.text, 1);
  context.restore();
  drawAxis(context, view);
}

/** Adds rectangles (x, y, width, height) of a lane to the batch of their colour. */
function collectLane(view, place, batches, labels) {
  const { trace, palette } = view;
  const { lane, rowHeight } = place;
  const scale = view.pixelsPerNs;
  const [left, right] = [view.left, view.right];
  const stride = Math.max(Math.floor(0.7 / rowHeight), 1); // of rows that share a line of pixels one is drawn
  for (let row = 0; row < lane.rows.length; row += stride) {
    const [from, to] = [row ? lane.rows[row - 1] : 0, lane.rows[row]];
    const y = place.y + row * rowHeight;
    const tall = Math.max(stride * rowHeight - (rowHeight > 3 ? 1 : 0), 0.7);
    if (y > view.height || y + tall < 0) continue;
    let at = firstAfter(trace, lane.packed, from, to, left);
    while (at < to) {
      const span = lane.packed[at];
      const begin = trace.begin[span];
      if (begin > right) break;
      const x = (begin - left) * scale;
      const wide = (trace.end[span] - begin) * scale;
      batches[palette.of(span)].push(Math.max(x, -2), y, Math.max(Math.min(x + wide, view.width + 2) - Math.max(x, -2) - (wide > 4 ? 1 : 0), 1), tall);
      if (wide > LABEL_PIXELS && rowHeight >= 10 && labels.length < MAX_LABELS) labels.push(span, x, y, wide, tall);
      at = wide < 1 ? firstAfter(trace, lane.packed, at + 1, to, left + (Math.floor(x) + 1) / scale) : at + 1;
    }
  }
}

function fill(context, view, batches) {
  batches.forEach((batch, color) => {
    context.fillStyle = view.palette.colors[color];
    for (let at = 0; at < batch.length; at += 4) context.fillRect(batch[at], batch[at + 1], batch[at + 2], batch[at + 3]);
  });
}

/** A lane with very many rows: how many spans there are at each pixel. */
function drawDepth(context, view, place) {
  const { lane } = place;
  const begins = (lane.begins ??= Float64Array.from(lane.spans, (span) => view.trace.begin[span]));
  context.fillStyle = view.palette.deep(lane.spans[0]);
  const unit = place.height / lane.rows.length;
  for (let x = 0; x < view.width; x++) {
    const [from, to] = [view.left + x / view.pixelsPerNs, view.left + (x + 1) / view.pixelsPerNs];
    const deep = countUntil(begins, to) - countUntil(lane.ends, from);
    if (deep > 0) context.fillRect(x, place.y, 1, Math.min(deep * unit, place.height));
  }
}

function drawLabels(context, view, labels) {
  context.font = `10px ${view.theme.font}`;
  context.textBaseline = "middle";
  for (let at = 0; at < labels.length; at += 5) {
    const [span, x, y, wide, tall] = labels.slice(at, at + 5);
    const from = Math.max(x, 0) + 3;
    const room = Math.min(x + wide, view.width) - from - 3;
    const text = view.labelOf(span);
    const fitting = Math.floor(room / 5.6);
    if (fitting < 4) continue;
    context.fillStyle = readable(view.palette.colors[view.palette.of(span)]);
    context.fillText(text.length > fitting ? `${text.slice(0, fitting - 1)}…` : text, from, y + tall / 2 + 0.5);
  }
}

const known = new Map();
/** Black or white, whichever can be read on a colour. */
function readable(color) {
  if (!known.has(color)) {
    const hex = color.startsWith("#") ? [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)) : color.match(/\d+/g).map(Number);
    const [red, green, blue] = hex.map((part) => (part / 255) ** 2.2);
    known.set(color, 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.28 ? "#111" : "#fff");
  }
  return known.get(color);
}

/** Fades everything and draws the highlighted spans again. */
function drawHighlighted(context, view) {
  context.globalAlpha = 0.72;
  context.fillStyle = view.theme.background;
  context.fillRect(0, AXIS, view.width, view.height - AXIS);
  context.globalAlpha = 1;
  const batches = view.palette.colors.map(() => []);
  if (view.highlightedLanes) {
    for (const place of view.visibleLanes()) {
      if (!place.header) collectLane(view, { ...place, lane: view.highlightedLanes.get(place.lane) }, batches, []);
    }
  } else {
    for (const span of view.highlighted) {
      const rect = view.rectOf(span);
      if (!rect.shown || rect.collapsed) continue;
      batches[view.palette.of(span)].push(rect.x, rect.y, Math.max(rect.width, 1.5), Math.max(rect.height, 2));
    }
  }
  fill(context, view, batches);
}

function outline(context, view, span, color, line) {
  const rect = view.rectOf(span);
  if (!rect.shown) return;
  context.strokeStyle = color;
  context.lineWidth = line;
  context.strokeRect(rect.x - line, rect.y - line, Math.max(rect.width, 2) + 2 * line, Math.max(rect.height, 3) + 2 * line);
}

/** Arrows through what the selected slice passed. */
function drawFlow(context, view) {
  const { trace, theme } = view;
  context.lineWidth = 1.5;
  for (const chain of chainsOf(view)) {
    const sorted = [...chain].sort((a, b) => place(trace, a) - place(trace, b) || trace.begin[a] - trace.begin[b]);
    const main = trace.rank[chain[0]] === trace.rank[view.selected] || trace.kindOf(view.selected) === "aggregate";
    context.strokeStyle = context.fillStyle = main ? theme.flow : theme.flowOther;
    for (let at = 0; at + 1 < sorted.length; at++) arrow(context, view, sorted[at], sorted[at + 1]);
  }
  for (const span of view.followed) outline(context, view, span, theme.text, 1);
}

/** One chain per rank, and of a table per pserver and slice; sums belong to all, as do lookups and what has no slice. */
function chainsOf({ trace, followed, selected }) {
  const isTable = trace.tables.has(trace.bucket[selected]);
  const chains = new Map();
  const shared = [];
  for (const span of followed) {
    const key = [trace.rank[span], ...(isTable ? [trace.pserver[span], trace.slice[span]] : [])].join();
    if (trace.kindOf(span) === "aggregate" || (isTable && trace.slice[span] < 0)) shared.push(span);
    else if (!chains.has(key)) chains.set(key, [span]);
    else chains.get(key).push(span);
  }
  const belongs = (span, own) => {
    if (trace.kindOf(span) === "aggregate") return !isTable || trace.pserver[span] === trace.pserver[own[0]];
    // A question without ids only says that no more will come: no lookup waits for its answer.
    const isWaitedFor = trace.kindOf(span) !== "lookup" || own.some((one) => trace.kindOf(one) === "held");
    return trace.rank[span] === trace.rank[own[0]] && isWaitedFor;
  };
  return [...chains.values()].map((own) => [...own, ...shared.filter((span) => belongs(span, own))]);
}

const place = (trace, span) => FLOW.indexOf(trace.kindOf(span));

function arrow(context, view, one, other) {
  const [from, to] = [view.rectOf(one), view.rectOf(other)];
  const start = from.x + Math.max(from.width, 0);
  const end = Math.min(Math.max(to.x, start), to.x + Math.max(to.width, 1));
  const [y1, y2] = [from.y + from.height / 2, to.y + to.height / 2];
  if (Math.max(start, end) < 0 || Math.min(start, end) > view.width) return;
  const bend = Math.max(Math.abs(end - start) / 2, 12);
  context.beginPath();
  context.moveTo(start, y1);
  context.bezierCurveTo(start + bend, y1, end - bend, y2, end, y2);
  context.stroke();
  context.beginPath();
  context.moveTo(end, y2);
  context.lineTo(end - 5, y2 - 3);
  context.lineTo(end - 5, y2 + 3);
  context.fill();
}

function drawSteps(context, view) {
  context.fillStyle = view.theme.grid;
  for (const step of view.trace.steps) {
    const x = Math.round(view.xOf(step.begin));
    if (x >= 0 && x <= view.width) context.fillRect(x, AXIS, 1, view.height);
  }
}

/** Lines through all lanes where the job's view changed, with labels that do not overlap. */
function drawChanges(context, view) {
  const { trace, theme } = view;
  const color = view.colorOfChanges;
  context.font = `11px ${theme.font}`;
  context.textBaseline = "middle";
  const until = []; // per row of labels
  for (const span of trace.changes) {
    const x = Math.round(view.xOf(trace.begin[span]));
    if (x < 0 || x > view.width) continue;
    context.fillStyle = color;
    context.fillRect(x, AXIS, 2, view.height);
    const text = shortened(view.labelOf(span));
    const wide = context.measureText(text).width + 8;
    const left = Math.max(Math.min(x, view.width - wide), 0);
    let row = until.findIndex((end) => end <= left);
    if (row < 0) row = until.length;
    until[row] = left + wide + 4;
    const y = AXIS + 2 + row * CHANGE_ROW;
    context.fillRect(left, y, wide, CHANGE_ROW - 2);
    context.fillStyle = readable(color);
    context.fillText(text, left + 4, y + CHANGE_ROW / 2 - 0.5);
  }
}

const shortened = (text) => (text.length > MAX_CHANGE ? `${text.slice(0, MAX_CHANGE - 1)}…` : text);

function drawAxis(context, view) {
  const { theme, trace } = view;
  context.fillStyle = theme.header;
  context.fillRect(0, 0, view.width, AXIS);
  context.font = `11px ${theme.font}`;
  context.textBaseline = "middle";
  const step = tick(90 / view.pixelsPerNs);
  const [scale, unit] = step >= 1e9 ? [1e9, "s"] : step >= 1e5 ? [1e6, "ms"] : [1e3, "µs"];
  const digits = Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9));
  const steps = trace.steps.map((one) => [Math.round(view.xOf(one.begin)), `step ${one.step}`]).filter(([x]) => x >= -60 && x <= view.width);
  let until = -Infinity;
  const named = steps.filter(([x]) => (x - until < 64 ? false : ((until = x), true)));
  context.fillStyle = theme.muted;
  for (let time = Math.ceil((view.left - trace.first) / step) * step; time <= view.right - trace.first; time += step) {
    const x = view.xOf(time + trace.first);
    context.fillRect(Math.round(x), AXIS - 4, 1, 4);
    const text = `${(time / scale).toFixed(digits)} ${unit}`;
    if (!named.some(([other]) => x + 60 > other - 2 && x < other + 60)) context.fillText(text, x + 3, AXIS / 2);
  }
  context.fillStyle = theme.text;
  for (const [x, text] of named) {
    context.fillRect(x, 0, 1, AXIS);
    context.fillText(text, x + 4, AXIS / 2);
  }
}

/** The smallest of 1, 2, 5 times a power of ten that is at least as large. */
function tick(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= least) ?? 10 * power;
}
