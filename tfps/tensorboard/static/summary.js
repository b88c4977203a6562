// The figures that Python computed (tfps.summary), for reading.

import { bytes, el, percent, time } from "./dom.js";

const SHOWN = 10;
const FEW = 2; // gates named

/** The panel above a timeline. @param other the summary whose figures this one's are compared with, or null; compared: there are two panes; onChange gets the number of a change. */
export function summaryPanel(summary, other, compared, onVariable, onChange) {
  const { totals } = summary;
  const steps = summary.steps.length;
  const base = other && { ...other.totals, steps: other.steps.length };
  const mean = (name) => totals[name] / steps;
  const change = (name) => (base && base[name] ? mean(name) / (base[name] / base.steps) - 1 : null);
  const cards = [
    card("step", time(mean("duration_ns")), `${steps} steps`, change("duration_ns")),
    card("computing", time(mean("compute_ns")), percent(totals.compute_ns / totals.duration_ns), change("compute_ns")),
    card("exposed wait", time(mean("exposed_ns")), percent(totals.exposed_ns / totals.duration_ns), change("exposed_ns")),
    card("overlap", percent(totals.overlap), "of exchange hidden"),
    card("slowest", totals.slowest == null ? "–" : `worker ${totals.slowest}`,
      totals.slowest == null ? "nobody was waited for" : `a slice waits ${time(totals.waited_for[totals.slowest] / totals.sums)}`),
    card("out of order", String(totals.inversions), `of ${totals.messages}`),
  ];
  if (totals.input_ns) cards.splice(3, 0, card("waiting for input", time(mean("input_ns")), percent(totals.input_ns / totals.duration_ns)));
  return el("section", { class: "summary", "aria-label": `summary of ${summary.name}` },
    el("p", { class: "limit" }, el("b", {}, "Limited by "), summary.limit),
    summary.view ? el("p", { class: "view" }, el("b", {}, "At the start "), summary.view) : null,
    ...summary.changes.map((change, number) => el("p", { class: "view" }, el("b", {}, "At "),
      el("button", { class: "change", title: "show in the timeline", onclick: () => onChange(number) }, change))),
    el("div", { class: "cards" }, ...cards),
    el("details", { open: !compared }, el("summary", {}, "Variables, pservers, steps"),
      el("div", { class: "tables" }, variables(summary, onVariable),
        summary.tables?.length ? tables(summary, onVariable) : null, summary.parts?.length ? parts(summary) : null, pservers(summary), eachStep(summary))),
  );
}

function card(name, value, note, change = null) {
  const better = change == null || Math.abs(change) < 0.005 ? null
    : el("span", { class: change < 0 ? "better" : "worse" }, `${change < 0 ? "▼" : "▲"} ${percent(Math.abs(change))}`);
  return el("div", { class: "card", "data-name": name }, el("span", {}, name), el("strong", {}, value), el("small", {}, note, better));
}

function table(caption, heads, rows) {
  return el("table", {}, el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell))))));
}

function bar(part, text) {
  const wide = `${(100 * Math.min(part, 1)).toFixed(1)}%`;
  return el("span", { class: "bar", style: `--part:${wide}` }, text);
}

function variables(summary, onVariable) {
  const most = summary.costs[0]?.exposed_ns ?? 1;
  const runs = summary.workers * summary.steps.length;
  const rows = summary.costs.slice(0, SHOWN).map((cost) => [
    el("button", { class: "link", title: "show in the timeline", onclick: () => onVariable(cost.variable) }, cost.variable),
    bar(cost.exposed_ns / most, time(cost.exposed_ns / runs)),
  ]);
  const made = table("most waited for, per step and worker", ["variable", "exposed wait"], rows);
  if (!rows.length) made.tBodies[0].append(el("tr", {}, el("td", { colspan: 2 }, "no read waited")));
  if (summary.inversion) {
    const { sent, waiting, times } = summary.inversion;
    made.append(el("tfoot", {}, el("tr", {}, el("td", { colspan: 2 }, `most often out of order: ${sent} sent while ${waiting} waited (${times} times)`))));
  }
  return made;
}

function tables(summary, onVariable) {
  const runs = summary.workers * summary.steps.length;
  const most = Math.max(...summary.tables.map((one) => one.wait_ns), 1);
  return table("tables, per step and worker", ["table", "waited for rows", "held back", "asked", "rows", "gradients"], summary.tables.map((one) => [
    el("button", { class: "link", title: "show in the timeline", onclick: () => onVariable(one.table) }, one.table),
    bar(one.wait_ns / most, time(one.wait_ns / runs)), time(one.held_ns / Math.max(one.questions, 1)),
    ...[one.asked_bytes, one.rows_bytes, one.gradient_bytes].map((nbytes) => bytes(Math.round(nbytes / runs))),
  ]));
}

function parts(summary) {
  const runs = summary.workers * summary.steps.length;
  const most = Math.max(...summary.parts.map((one) => one.ran_ns), 1);
  return table("parts that XLA compiles, per step and worker", ["part", "waits at the gates of", "ran", "compiled in"], summary.parts.map((one) => [
    one.part, one.waits.slice(0, FEW).join(", ") + (one.waits.length > FEW ? ` and ${one.waits.length - FEW} more` : ""),
    bar(one.ran_ns / most, time(one.ran_ns / runs)), time(one.compile_s * 1e9),
  ]));
}

function pservers(summary) {
  const { links, duration_ns: whole } = summary.totals;
  const steps = summary.steps.length;
  return table("pservers, per step", ["", "pushed", "in use", "replied", "in use"], links.map((link) => [
    `pserver ${link.pserver}`,
    bytes(Math.round(link.pushed_bytes / steps)), bar(link.push_busy_ns / whole, percent(link.push_busy_ns / whole)),
    bytes(Math.round(link.replied_bytes / steps)), bar(link.reply_busy_ns / whole, percent(link.reply_busy_ns / whole)),
  ]));
}

function eachStep(summary) {
  return table("steps, means of workers", ["step", "took", "computing", "exposed", "overlap", "slowest", "out of order"],
    summary.steps.map(({ step, totals }) => [
      String(step), time(totals.duration_ns), time(totals.compute_ns), time(totals.exposed_ns), percent(totals.overlap),
      totals.slowest == null ? "–" : `worker ${totals.slowest}`, String(totals.inversions),
    ]));
}
