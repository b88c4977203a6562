// The calculator on the page "Size a job": reads the form, computes (bound.js), writes the answers.

"use strict";

(() => {
  const home = document.getElementById("tfps-size");
  if (!home) return;
  const RATES = [1, 2.5, 5, 10, 25, 40, 100];
  const OWN = "own", EVEN = "even", EVEN_LAYERS = 50;
  const profiles = { ...tfpsProfiles };

  home.innerHTML = `
    <form>
      <fieldset>
        <legend>Model</legend>
        <label>Profile <select name="model">
          ${Object.keys(profiles).map((name) => `<option value="${name}">${name}</option>`).join("")}
          <option value="${EVEN}">by size and time</option>
          <option value="${OWN}">from a file</option>
        </select></label>
        <label data-for="${EVEN}">Parameters, MB <input name="megabytes" type="number" min="0.001" step="any" value="100"></label>
        <label data-for="${EVEN}">Computing, s per step <input name="seconds" type="number" min="0" step="any" value="0.2"></label>
        <label data-for="${OWN}">File of <code>save_profile</code> <input name="file" type="file" accept=".json"></label>
      </fieldset>
      <fieldset>
        <legend>Hosts</legend>
        <label>Workers <input name="workers" type="number" min="1" max="4096" step="1" value="4"></label>
        <label>Pservers <input name="pservers" type="number" min="1" max="4096" step="1" value="4"></label>
        <label>Pservers are <select name="place">
          <option value="beside">on the workers' hosts</option>
          <option value="dedicated">on hosts of their own</option>
        </select></label>
      </fieldset>
      <fieldset>
        <legend>Network and processors</legend>
        <label>Each host's link, Gbit/s <input name="rate" type="number" min="0.001" step="any" value="10"></label>
        <label>Of it for payload <input name="goodput" type="number" min="0.01" max="1" step="any" value="0.95"></label>
        <label>One way, ms <input name="latency" type="number" min="0" step="any" value="0.05"></label>
        <label>CPU, s per GB <input name="cpu" type="number" min="0" step="any" value="1.7"></label>
        <label>Cores per process <input name="cores" type="number" min="0.1" step="any" value="1"></label>
      </fieldset>
    </form>
    <p class="tfps-error" role="alert"></p>
    <dl>
      <dt>A step takes at least</dt><dd><output name="step"></output></dd>
      <dt>of it computing</dt><dd><output name="compute"></output></dd>
      <dt>What it waits for</dt><dd><output name="limit"></output></dd>
      <dt>Pservers that are enough here</dt><dd><output name="enough"></output></dd>
      <dt>Link from which computing takes 90 % of a step</dt><dd><output name="needed"></output></dd>
    </dl>
    <table><thead></thead><tbody></tbody></table>`;

  const form = home.querySelector("form"), fields = form.elements;
  const error = home.querySelector(".tfps-error");

  function number(name) {
    const field = fields[name];
    if (!field.checkValidity() || field.value === "") {
      throw new Error(`${field.closest("label").firstChild.textContent.trim()}: ${field.validationMessage || "give a number"}`);
    }
    return field.valueAsNumber;
  }

  function layers() {
    const model = fields.model.value;
    if (model !== EVEN) {
      if (!profiles[model]) throw new Error("Choose a file that report().save_profile(path) has written.");
      return profiles[model];
    }
    // As many equal layers, a third of the time forward.
    const nbytes = (number("megabytes") * 1e6) / EVEN_LAYERS, seconds = number("seconds") / EVEN_LAYERS;
    return Array(EVEN_LAYERS).fill({ forward_s: seconds / 3, backward_s: (seconds * 2) / 3, nbytes });
  }

  function cluster() {
    return {
      workers: number("workers"), pservers: number("pservers"), rateGbit: number("rate"), goodput: number("goodput"),
      latencyS: number("latency") / 1e3, dedicated: fields.place.value === "dedicated", cpuGbS: number("cpu"),
      processCores: number("cores"),
    };
  }

  // `value` stays readable for programs in full.
  function say(name, value, text) {
    const output = home.querySelector(`output[name=${name}]`);
    output.value = text;
    output.dataset.value = value;
  }

  const shown = (seconds) => (seconds < 0.1 ? `${(seconds * 1e3).toPrecision(3)} ms` : `${seconds.toPrecision(3)} s`);

  function table(chain, here) {
    const counts = [...new Set([here.pservers, 1, 2, 4, 8].map((part, place) =>
      place ? Math.max(1, Math.round(here.workers / part)) : part))].sort((a, b) => a - b);
    const head = counts.map((count) => `<th>${count} pserver${count > 1 ? "s" : ""}</th>`).join("");
    home.querySelector("thead").innerHTML = `<tr><th>link</th>${head}</tr>`;
    home.querySelector("tbody").innerHTML = [...new Set([...RATES, here.rateGbit])].sort((a, b) => a - b).map((rateGbit) => {
      const cells = counts.map((pservers) => {
        const { stepS, computeS } = tfpsBound.leastStep(chain, { ...here, rateGbit, pservers });
        const part = computeS / stepS, chosen = rateGbit === here.rateGbit && pservers === here.pservers;
        const style = `background: color-mix(in srgb, var(--md-primary-fg-color) ${Math.round(part ** 3 * 45)}%, transparent)`;
        return `<td data-step="${stepS}" style="${style}">${chosen ? "<b>" : ""}${shown(stepS)}${chosen ? "</b>" : ""}</td>`;
      });
      return `<tr><th>${rateGbit} Gbit/s</th>${cells.join("")}</tr>`;
    }).join("");
  }

  function update() {
    for (const label of form.querySelectorAll("label[data-for]")) label.hidden = label.dataset.for !== fields.model.value;
    error.textContent = "";
    try {
      const chain = layers(), here = cluster(), { stepS, computeS, limit } = tfpsBound.leastStep(chain, here);
      const enough = tfpsBound.fewestPservers(chain, here), needed = tfpsBound.rateFor(chain, here);
      say("step", stepS, shown(stepS));
      say("compute", computeS, `${shown(computeS)}, ${Math.round((computeS / stepS) * 100)} %`);
      say("limit", limit, stepS < 1.005 * computeS ? "nothing but computing" : limit);
      say("enough", enough, String(enough));
      say("needed", needed, needed === Infinity ? "no link: the network is not the limit" : `${needed.toPrecision(3)} Gbit/s`);
      table(chain, here);
    } catch (problem) {
      error.textContent = problem.message;
      for (const name of ["step", "compute", "limit", "enough", "needed"]) say(name, "", "");
      home.querySelector("tbody").innerHTML = "";
    }
  }

  fields.file.addEventListener("change", async () => {
    delete profiles[OWN];
    try {
      const profile = JSON.parse(await fields.file.files[0].text());
      const good = (layer) => ["forward_s", "backward_s", "nbytes"].every((key) => Number.isFinite(layer[key]) && layer[key] >= 0);
      if (Array.isArray(profile.layers) && profile.layers.length && profile.layers.every(good)) profiles[OWN] = profile.layers;
    } catch (problem) {
      // Not JSON: `layers` says what is wanted.
    }
    update();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", update);
  update();
})();
