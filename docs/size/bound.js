// The lower bound of a step (docs/lower_bound.md), as tests/helpers/bounds.py computes it; a test compares the two.

"use strict";

const tfpsBound = (() => {
  // What a cluster is made of, with the defaults of that module.
  const DEFAULTS = { goodput: 1, latencyS: 50e-6, dedicated: false, cpuGbS: 1.7, processCores: 1 };

  // Bytes that the busiest link carries in one direction per byte of parameters, under the best placement.
  function busiestLink({ workers, pservers, dedicated }) {
    if (dedicated) return Math.max(1, workers / pservers);
    if (workers <= 2) return workers - 1;
    if (pservers <= workers) return 1 + (workers - 2) / pservers;
    const alone = (pservers - workers) / workers, mixed = workers / (workers - 2);
    return Math.max(1, (1 + mixed) / (mixed + alone));
  }

  // What part of the parameters some worker must push to another host.
  function remotePart({ workers, pservers, dedicated }) {
    return dedicated || pservers < workers ? 1 : 1 - 1 / workers;
  }

  // Seconds that the exchange of some bytes takes at least, by what takes them.
  function exchange(cluster, nbytes) {
    const { workers, pservers, rateGbit, goodput, latencyS, dedicated, cpuGbS, processCores } = cluster;
    const cpuS = (2 * cpuGbS * nbytes) / 4e9 / processCores;
    const found = { "the worker's processor": cpuS, "the busiest pserver's processor": (cpuS * workers) / pservers };
    if (dedicated || workers > 1) {
      const wireS = nbytes / ((rateGbit * 1e9 / 8) * goodput);
      found["the busiest link"] = wireS * busiestLink(cluster) + latencyS;
      found["the way to the pservers and back"] = wireS * remotePart(cluster) + 2 * latencyS;
    }
    return found;
  }

  // {stepS, computeS, limit}: the shortest step of layers in forward order, and what it waits for.
  function leastStep(layers, given) {
    const cluster = { ...DEFAULTS, ...given };
    const computeS = layers.reduce((sum, layer) => sum + layer.forward_s + layer.backward_s, 0);
    let stepS = computeS, limit = "computing", beforeS = 0, nbytes = 0;
    for (const layer of layers) {
      nbytes += layer.nbytes;
      if (nbytes) {
        for (const [name, seconds] of Object.entries(exchange(cluster, nbytes))) {
          const neededS = computeS - beforeS + seconds;
          if (neededS > stepS) [stepS, limit] = [neededS, name];
        }
      }
      beforeS += layer.forward_s + layer.backward_s;
    }
    return { stepS, computeS, limit };
  }

  // The fewest pservers, up to one per worker, whose step is within `slack` of the shortest.
  function fewestPservers(layers, cluster, slack = 1.02) {
    const stepS = (pservers) => leastStep(layers, { ...cluster, pservers }).stepS;
    const enough = slack * stepS(cluster.workers);
    let pservers = 1;
    while (pservers < cluster.workers && stepS(pservers) > enough) pservers += 1;
    return pservers;
  }

  // The rate in Gbit/s from which computing takes at least `part` of a step; infinite if no network is fast enough.
  function rateFor(layers, cluster, part = 0.9) {
    const fits = (rateGbit) => {
      const { stepS, computeS } = leastStep(layers, { ...cluster, rateGbit });
      return computeS >= part * stepS;
    };
    let [low, high] = [1e-3, 1e4];
    if (!fits(high)) return Infinity;
    for (let round = 0; round < 60; round += 1) {
      const middle = Math.sqrt(low * high);
      if (fits(middle)) high = middle;
      else low = middle;
    }
    return high;
  }

  return { leastStep, fewestPservers, rateFor };
})();
