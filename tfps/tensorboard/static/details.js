// The table of what happened to the selected slice.

import { bytes, el, time } from "./dom.js";
import { KIND_WORDS } from "./colors.js";

const SHOWN = 10; // gradients that lack slices

/** The panel below a timeline; `timeline.selected` is what it is about. */
export function detailsPanel(timeline) {
  const { trace, selected, followed } = timeline;
  const title = el("h2", {}, heading(timeline));
  const close = el("button", { title: "close (Escape)", onclick: () => timeline.select(-1) }, "✕");
  const focus = el("button", {
    title: "show only the lanes that it passed (f)", "aria-pressed": String(timeline.focus),
    onclick: () => timeline.setFocus(!timeline.focus),
  }, "only its lanes");
  timeline.onFocus = () => focus.setAttribute("aria-pressed", String(timeline.focus));
  const bar = el("div", { class: "bar-line" }, title, focus, ...stepButtons(timeline), close);
  const sorted = [...followed].sort((a, b) => trace.begin[a] - trace.begin[b] || trace.end[a] - trace.end[b]);
  const first = trace.begin[sorted[0]];
  const rows = sorted.map((span) => {
    const took = trace.end[span] - trace.begin[span];
    const kind = trace.kindOf(span);
    const note = kind === "aggregate" && trace.rank[span] >= 0 ? `waited for worker ${trace.rank[span]}` : "";
    const cells = [
      el("button", { class: "link", onclick: () => timeline.select(span, true) }, KIND_WORDS[kind] ?? kind),
      trace.processOf(span).name, trace.lane[span].name, trace.rank[span] < 0 ? "" : `worker ${trace.rank[span]}`,
      time(trace.begin[span] - first), took ? time(took) : "", trace.nbytes[span] < 0 ? "" : bytes(trace.nbytes[span]), note,
    ];
    return el("tr", { class: span === selected ? "selected" : "", "data-span": span }, ...cells.map((cell) => el("td", {}, cell)));
  });
  const heads = ["what", "where", "lane", "for", "after", "took", "size", ""];
  return el("section", { class: "details", "aria-label": "the selected slice" }, bar,
    el("div", { class: "rows" }, el("table", {},
      el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, ...rows)),
      ...(trace.kindOf(selected) === "change" ? ofChange(trace, selected) : []),
      ...(trace.kindOf(selected) === "part" ? ofPart(trace.parts[trace.slice[selected]]) : [])));
}

/** Who takes part from a change on, and what the first step without a lost worker lacks. */
function ofChange(trace, span) {
  const { note, lacking } = trace.viewOf(span);
  const names = Object.entries(lacking).map(([name, slices]) => `${name} [${slices.join(", ")}]`);
  const more = names.length > SHOWN ? ` and of ${names.length - SHOWN} more` : "";
  return [
    el("p", {}, `From here on ${trace.presentAfter(span)}.`),
    note ? el("p", {}, `${note}. Slices without it: ${names.slice(0, SHOWN).join(", ")}${more}.`) : null,
  ].filter((one) => one !== null);
}

/** For which gates a part waits, and how long XLA took. */
function ofPart(part) {
  if (!part) return [];
  return [
    el("p", {}, part.waits.length ? `It waits at the gates of ${part.waits.join(", ")}.` : "It waits at no gate itself."),
    el("p", {}, part.sends.length ? `It computes the gradients of ${part.sends.join(", ")}.` : "It computes no gradients that leave."),
    el("p", {}, `Compiled in ${time(part.compile_s * 1e9)} on worker 0.`),
  ];
}

function heading(timeline) {
  const { trace, selected } = timeline;
  if (["change", "part"].includes(trace.kindOf(selected))) return timeline.labelOf(selected);
  const bucket = trace.bucket[selected];
  if (bucket < 0) return `${KIND_WORDS[trace.kindOf(selected)]}, step ${trace.step[selected]}`;
  const slice = trace.slice[selected];
  const what = trace.tables.has(bucket) ? trace.isLookup(selected) ? "rows asked for" : "gradients of rows"
    : slice < 0 ? `bucket ${bucket}` : `slice ${bucket}/${slice}`;
  return `${what} in step ${trace.step[selected]}: ${trace.buckets[bucket].name} (priority ${trace.buckets[bucket].priority})`;
}

/** To the same slice one step before and after. */
function stepButtons(timeline) {
  const { trace, selected } = timeline;
  return [["‹ step", -1], ["step ›", 1]].map(([text, by]) => {
    const other = same(trace, selected, by);
    return el("button", { disabled: other < 0, onclick: () => timeline.select(other, true) }, text);
  });
}

function same(trace, span, by) {
  // Whom a sum waits for differs, and questions for rows are numbered anew in each step.
  const fields = ["kind", "bucket", "slice", "variable", "rank", "pserver"].filter((name) =>
    !(name === "rank" && trace.kindOf(span) === "aggregate") && !(name === "slice" && trace.isLookup(span)));
  for (let other = span + by; other >= 0 && other < trace.count; other += by) {
    if (trace.step[other] === trace.step[span] + by && fields.every((name) => trace[name][other] === trace[name][span])) return other;
  }
  return -1;
}
