/** What became of a prompt: a sign beside each word, so that neither depends on color. Steps count up to the delivered checkpoint. */

import type { Outcome } from "./types";

export const OUTCOMES: Record<Outcome, { sign: string; kind: string; meaning: string }> = {
  learned: { sign: "▲", kind: "good", meaning: "solved at the counted step, not at the first" },
  kept: { sign: "●", kind: "soft", meaning: "solved at the first and the counted step" },
  forgotten: { sign: "▼", kind: "bad", meaning: "not solved at the counted step, but at an earlier one" },
  stuck: { sign: "○", kind: "warn", meaning: "never solved" },
  ungraded: { sign: "?", kind: "soft", meaning: "no answer has a score" },
};
