// What became of a request, in a word and a sentence. Reasons are the service's own words.

import { leftMs } from "./budget.js";
import { ms, plural } from "./format.js";

const NAMES = {
  met: "Met",
  partial: "Cut short",
  missed: "Missed",
  refused: "Refused",
  aborted: "Cancelled",
  failed: "Failed",
  lost: "Lost",
};

// `kind` is for colours and marks, `name` for people.
export function verdictOf(run) {
  if (!run.isOver) {
    if (run.cancelling) return { kind: "live", name: "Cancelling …" };
    const names = { sending: "Sending …", queued: "Waiting …", running: "Running …" };
    return { kind: "live", name: names[run.stage] };
  }
  if (run.outcome === "met" && isCutToFit(run)) return { kind: "fitted", name: "Cut to fit" };
  return { kind: run.outcome, name: NAMES[run.outcome] ?? run.outcome };
}

export function isCutToFit(run) {
  return run.fitted !== null && run.fitted < run.asked.maxTokens;
}

export function figuresOf(run, now) {
  const left = leftMs(run, now);
  if (!run.isOver) {
    if (run.stage === "queued" && run.queuePosition > 0) return `${run.queuePosition} ahead of it`;
    return left >= 0 ? `${ms(left)} left` : `${ms(-left)} too late`;
  }
  if (run.outcome === "refused" || run.outcome === "lost") return `after ${ms(run.elapsedMs())}`;
  if (left < 0) return `${ms(-left)} too late`;
  if (run.outcome === "met" || run.outcome === "partial") return `${ms(left)} to spare`;
  // A part of it was late, or what was left to do could not be done in time.
  const how = run.outcome === "missed" ? "given up " : "";
  return `${how}${ms(left)} before the deadline`;
}

// Why, where there is something to say; null for what went as asked.
export function reasonOf(run) {
  if (run.error) return run.error.message;
  if (run.isOver && run.outcome === "partial") {
    return `The deadline came first: here is what there was, ${plural(run.tokens, "token")}.`;
  }
  if (isCutToFit(run)) {
    return `The deadline allows ${plural(run.fitted, "token")} of the ${run.asked.maxTokens} that were asked for.`;
  }
  return null;
}
