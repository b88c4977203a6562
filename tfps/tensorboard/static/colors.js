// Colours that colour-blind people can tell apart: Okabe and Ito's for kinds, viridis for the order of layers.

const KINDS = {
  forward: ["#0072b2", "#3d9be0"],
  backward: ["#56b4e9", "#9fd4f5"],
  part: ["#8aa4c8", "#6f8fbf"],
  gate: ["#d55e00", "#ff7a1a"],
  lookup: ["#8c2d04", "#ffb48a"],
  input: ["#b8860b", "#f0e442"],
  staging: ["#d9c76a", "#a89a45"],
  queued: ["#c2c6cc", "#5b626b"],
  wire: ["#009e73", "#1fc797"],
  held: ["#b7a8d6", "#6f5f96"],
  aggregate: ["#cc79a7", "#d98cb9"],
  reply_queued: ["#c2c6cc", "#5b626b"],
  reply_wire: ["#66c2a5", "#8fe0c6"],
  update: ["#e69f00", "#ffc140"],
  ready: ["#333333", "#dddddd"],
  step: ["#dfe3e8", "#3c434b"],
  change: ["#7b3294", "#c9a3dc"],
};
// 9 stops of viridis; the darkest and the brightest are left out, so that both themes show all of them.
const VIRIDIS = ["#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#e2e418"];
const STEPS = 64;

export const KIND_WORDS = {
  step: "step", forward: "forward", backward: "backward", part: "part that XLA compiled", gate: "waiting at a gate", lookup: "waiting for rows", input: "waiting for input",
  staging: "copy of a batch", ready: "gradient ready", queued: "in the send queue", wire: "on the wire",
  held: "rows held back", aggregate: "sum waits for all workers", reply_queued: "in the reply queue", reply_wire: "reply on the wire",
  update: "update", change: "change of the view",
};

/** The colour of a kind. */
export const colorOf = (kind, dark) => KINDS[kind][dark ? 1 : 0];

/** A palette: colours, and which of them a span has. */
export function palette(trace, by, dark) {
  const shade = dark ? 1 : 0;
  const kinds = trace.kinds.map((kind) => (KINDS[kind] ?? KINDS.queued)[shade]);
  if (by === "kind") {
    return { colors: kinds, of: (span) => trace.kind[span], deep: (span) => kinds[trace.kind[span]] };
  }
  const colors = [...Array(STEPS).keys()].map((step) => mix(step / (STEPS - 1)));
  const other = colors.push(dark ? "#4a525b" : "#cdd2d8") - 1;
  const gate = colors.push(KINDS.gate[shade]) - 1;
  const lookup = colors.push(KINDS.lookup[shade]) - 1;
  const least = Math.max(trace.buckets.length - 1, 1);
  const ofBucket = trace.buckets.map((_, bucket) => Math.round((trace.order[bucket] / least) * (STEPS - 1)));
  const waits = new Map([[trace.kinds.indexOf("gate"), gate], [trace.kinds.indexOf("lookup"), lookup]]);
  return {
    colors,
    deep: () => KINDS.queued[shade], // all layers at once
    of: (span) => waits.get(trace.kind[span]) ?? (trace.bucket[span] < 0 ? other : ofBucket[trace.bucket[span]]),
  };
}

/** The legend of a palette: pairs of colour and words. */
export function legend(trace, by, dark) {
  if (by !== "kind") {
    const waits = ["gate", ...(trace.tables.size ? ["lookup"] : [])];
    return [[mix(0), "first layer, most urgent"], [mix(0.5), "middle"], [mix(1), "last layer"],
      ...waits.map((kind) => [KINDS[kind][dark ? 1 : 0], KIND_WORDS[kind]])];
  }
  const present = new Set(trace.kind);
  return trace.kinds
    .filter((kind, number) => present.has(number) && kind !== "step" && kind !== "reply_queued")
    .map((kind) => [KINDS[kind][dark ? 1 : 0], kind === "queued" ? "in a queue" : KIND_WORDS[kind]]);
}

function mix(at) {
  const place = at * (VIRIDIS.length - 1);
  const first = Math.min(Math.floor(place), VIRIDIS.length - 2);
  const channel = (color, index) => parseInt(color.slice(1 + 2 * index, 3 + 2 * index), 16);
  const parts = [0, 1, 2].map((index) => {
    const [low, high] = [channel(VIRIDIS[first], index), channel(VIRIDIS[first + 1], index)];
    return Math.round(low + (high - low) * (place - first));
  });
  return `rgb(${parts.join(",")})`;
}
