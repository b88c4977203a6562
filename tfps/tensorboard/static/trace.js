// A capture in the browser: typed columns, and lanes whose spans are packed into rows without overlap.

const NUMBERS = ["step", "bucket", "slice", "variable", "priority", "nbytes", "rank", "pserver"];
// From top to bottom; lanes with other names come last.
const LANES = ["view", "steps", "compute", "parts", "gates", "input", "gradients", "queue", "to pserver", "updates", "rows",
  "aggregate", "reply queue", "to worker"];
const OF_TABLES = ["lookup", "held"];
const FIRST_LOOKUP = 65536; // of a table, the first slice with ids that rows are asked for; below it are gradients

export class Trace {
  /** @param content what docs/trace_format.md says of the first line. */
  constructor(content) {
    const columns = content.columns;
    this.count = columns.begin.length;
    this.name = content.name;
    this.settings = content.settings;
    this.processes = content.processes.map((one) => ({ ...one, name: `${one.role} ${one.number}` }));
    this.buckets = content.buckets;
    this.kinds = content.kinds;
    this.kind = Uint8Array.from(columns.kind);
    for (const name of NUMBERS) this[name] = Int32Array.from(columns[name]);
    this.begin = new Float64Array(this.count);
    this.end = new Float64Array(this.count);
    let at = 0;
    for (let span = 0; span < this.count; span++) {
      at += columns.begin[span];
      this.begin[span] = at;
      this.end[span] = at + columns.duration[span];
    }
    // Which position each bucket has in the order of first use.
    const sorted = this.buckets.map((_, bucket) => bucket).sort((a, b) => this.buckets[a].priority - this.buckets[b].priority);
    this.order = new Array(sorted.length);
    sorted.forEach((bucket, position) => (this.order[bucket] = position));
    this.lanes = this.#makeLanes(content.lanes, columns.lane);
    this.row = new Int32Array(this.count);
    for (const lane of this.lanes) pack(this, lane);
    this.lane = new Array(this.count);
    for (const lane of this.lanes) for (const span of lane.spans) this.lane[span] = lane;
    const ofTables = this.kinds.map((kind) => OF_TABLES.includes(kind));
    this.tables = new Set(this.bucket.filter((_, span) => ofTables[this.kind[span]])); // buckets
    this.steps = this.#steps();
    this.parts = content.parts ?? []; // that XLA compiles; their spans have their number as slice
    this.views = content.views ?? []; // the first at the start, then one for each change
    const change = this.kinds.indexOf("change");
    this.changes = [...this.kind.keys()].filter((span) => this.kind[span] === change);
    this.first = this.steps.length ? this.steps[0].begin : 0;
    this.last = this.end.reduce((last, end) => Math.max(last, end), 0);
  }

  kindOf(span) {
    return this.kinds[this.kind[span]];
  }

  /** Of the variable or bucket that a span is about. */
  variableOf(span) {
    if (this.bucket[span] < 0) return "";
    const bucket = this.buckets[this.bucket[span]];
    return this.variable[span] >= 0 ? bucket.variables[this.variable[span]] : bucket.name;
  }

  /** Whether a span is of a table, and about rows that are asked for, not about gradients. */
  isLookup(span) {
    return OF_TABLES.includes(this.kindOf(span)) || (this.tables.has(this.bucket[span]) && this.slice[span] >= FIRST_LOOKUP);
  }

  /** What a span is about: a variable or bucket and its slice, or which part of a table. */
  subjectOf(span) {
    if (this.kindOf(span) === "part") return this.parts[this.slice[span]]?.name ?? "part";
    const name = this.variableOf(span);
    if (OF_TABLES.includes(this.kindOf(span))) return name;
    if (!this.tables.has(this.bucket[span])) return name + (this.slice[span] >= 0 ? ` [${this.slice[span]}]` : "");
    const what = !this.isLookup(span) ? "gradients" : ["queued", "wire"].includes(this.kindOf(span)) ? "ids" : "rows";
    return `${what} of ${name}`;
  }

  /** Who takes part from a change on, and why. */
  viewOf(span) {
    return this.views[this.changes.indexOf(span) + 1];
  }

  /** "workers 0, 2 take part", from a change on. */
  presentAfter(span) {
    const { ranks } = this.viewOf(span);
    return `${ranks.length === 1 ? "worker" : "workers"} ${ranks.join(", ")} ${ranks.length === 1 ? "takes" : "take"} part`;
  }

  processOf(span) {
    return this.processes[this.lane[span].process];
  }

  /**
   * Everything that happened to a slice in its step, or to the bucket that a span is about, in order of time. Of a
   * table: to gradients, or to the rows that one worker has asked for.
   */
  follow(span) {
    const [step, bucket, slice] = [this.step[span], this.bucket[span], this.slice[span]];
    if (bucket < 0) return [span];
    const computing = new Set(["forward", "backward"]);
    const [isTable, asks] = [this.tables.has(bucket), this.isLookup(span)];
    const differ = (other, name) => this[name][span] >= 0 && this[name][other] >= 0 && this[name][other] !== this[name][span];
    const found = [];
    for (let other = 0; other < this.count; other++) {
      if (this.step[other] !== step || this.bucket[other] !== bucket) continue;
      if (slice >= 0 && this.slice[other] >= 0 && this.slice[other] !== slice) continue;
      if (isTable && (this.isLookup(other) !== asks || differ(other, "pserver") || (asks && differ(other, "rank")))) continue;
      if (!computing.has(this.kindOf(other))) found.push(other);
    }
    return found.length ? found : [span];
  }

  /** The buckets with a variable whose name contains a text. */
  search(text) {
    const wanted = text.trim().toLowerCase();
    const found = new Set();
    this.buckets.forEach((bucket, number) => {
      const names = [bucket.name, ...bucket.variables];
      if (wanted && names.some((name) => name.toLowerCase().includes(wanted))) found.add(number);
    });
    return found;
  }

  #makeLanes(names, column) {
    const counts = new Int32Array(names.length);
    for (const lane of column) counts[lane]++;
    const lanes = names.map(([process, name], number) => ({ process, name, number, spans: new Int32Array(counts[number]) }));
    const filled = new Int32Array(names.length);
    for (let span = 0; span < this.count; span++) {
      const lane = column[span];
      lanes[lane].spans[filled[lane]++] = span;
    }
    const place = (lane) => LANES.findIndex((name) => lane.name === name || lane.name.startsWith(`${name} `));
    const known = (lane) => (place(lane) < 0 ? LANES.length : place(lane));
    return lanes.filter((lane) => lane.spans.length).sort((a, b) =>
      a.process - b.process || known(a) - known(b) || a.name.localeCompare(b.name, "en", { numeric: true }));
  }

  /** The steps of the lowest rank that has any: number, begin, end. */
  #steps() {
    const lane = this.lanes.find((one) => this.kindOf(one.spans[0]) === "step");
    return lane ? [...lane.spans].map((span) => ({ step: this.step[span], begin: this.begin[span], end: this.end[span] })) : [];
  }
}

/** Packs a lane: `rows[r]` are the ends of row r in `packed`, spans by row and time. As tfps.capture.rows. */
function pack(trace, lane) {
  const busy = new Heap();
  const free = new Heap();
  let count = 0;
  const sizes = [];
  for (const span of lane.spans) {
    const begin = trace.begin[span];
    while (busy.size && busy.least <= begin) {
      const row = busy.pop();
      free.push(row, row);
    }
    if (!free.size) {
      free.push(count, count++);
      sizes.push(0);
    }
    const row = free.pop();
    trace.row[span] = row;
    sizes[row]++;
    busy.push(Math.max(trace.end[span], begin + 1), row);
  }
  const next = [];
  let at = 0;
  for (const size of sizes) {
    next.push(at);
    at += size;
  }
  lane.packed = new Int32Array(at);
  for (const span of lane.spans) lane.packed[next[trace.row[span]]++] = span;
  lane.rows = next;
  if (count > 1) lane.ends = Float64Array.from(lane.spans, (span) => trace.end[span]).sort();
}

/** A binary heap of values with a number to order them by. */
class Heap {
  keys = [];
  values = [];

  get size() {
    return this.keys.length;
  }

  get least() {
    return this.keys[0];
  }

  push(key, value) {
    let at = this.keys.length;
    this.keys.push(key);
    this.values.push(value);
    while (at > 0) {
      const parent = (at - 1) >> 1;
      if (this.keys[parent] <= key) break;
      this.keys[at] = this.keys[parent];
      this.values[at] = this.values[parent];
      at = parent;
    }
    this.keys[at] = key;
    this.values[at] = value;
  }

  pop() {
    const found = this.values[0];
    const [key, value] = [this.keys.pop(), this.values.pop()];
    const size = this.keys.length;
    if (size) {
      let at = 0;
      for (;;) {
        let child = 2 * at + 1;
        if (child >= size) break;
        if (child + 1 < size && this.keys[child + 1] < this.keys[child]) child++;
        if (this.keys[child] >= key) break;
        this.keys[at] = this.keys[child];
        this.values[at] = this.values[child];
        at = child;
      }
      this.keys[at] = key;
      this.values[at] = value;
    }
    return found;
  }
}
