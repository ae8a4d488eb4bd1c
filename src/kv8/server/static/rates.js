// What the server does now: differences between its counters, by its own clock.

const WINDOW = 120; // seconds

export class Rates {
  #samples = [];

  // Take one document; counters that ran backwards belong to another server, so start again.
  add(data) {
    const sample = {
      at: data.uptime_seconds,
      generated: data.counters.generated_tokens,
      prompt: data.counters.prompt_tokens,
      first: data.latency.time_to_first_token,
      next: data.latency.inter_token,
    };
    const last = this.#samples.at(-1);
    if (last && sample.at === last.at) return;
    if (last && (sample.at < last.at || sample.generated < last.generated)) this.#samples = [];
    this.#samples.push(sample);
    while (sample.at - this.#samples[0].at > WINDOW) this.#samples.shift();
  }

  // Seconds that the rates look back on.
  get span() {
    return this.#samples.length < 2 ? 0 : this.#samples.at(-1).at - this.#samples[0].at;
  }

  // Tokens a second between each two samples, as [{ at, value }].
  trace(name = "generated") {
    return this.#samples.slice(1).map((sample, i) => {
      const before = this.#samples[i];
      return { at: sample.at, value: (sample[name] - before[name]) / (sample.at - before.at) };
    });
  }

  // Tokens a second over the last few samples; null before there are two.
  now(name) {
    const recent = this.#samples.slice(-4);
    if (recent.length < 2) return null;
    const [first, last] = [recent[0], recent.at(-1)];
    return (last[name] - first[name]) / (last.at - first.at);
  }

  // Mean of a duration within the window, else since the start; null if there was none.
  mean(name) {
    const [first, last] = [this.#samples[0][name], this.#samples.at(-1)[name]];
    const recent = last.count - first.count;
    if (recent > 0) return { value: (last.sum_seconds - first.sum_seconds) / recent, recent: true };
    return last.count > 0 ? { value: last.sum_seconds / last.count, recent: false } : null;
  }
}
