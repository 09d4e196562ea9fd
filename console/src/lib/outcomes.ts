/** What became of a prompt: a sign beside each word, so that neither depends on color. Steps count up to the delivered checkpoint. */

import type { Outcome, Prompt } from "./types";

export const OUTCOMES: Record<Outcome, { sign: string; kind: string; meaning: string }> = {
  learned: { sign: "▲", kind: "good", meaning: "solved at the counted step, not at the first" },
  kept: { sign: "●", kind: "soft", meaning: "solved at the first and the counted step" },
  forgotten: { sign: "▼", kind: "bad", meaning: "not solved at the counted step, but at an earlier one" },
  stuck: { sign: "○", kind: "warn", meaning: "never solved" },
  ungraded: { sign: "?", kind: "soft", meaning: "no answer has a score" },
};

/** Why a prompt is not solved, in a few words, and what follows from it. */
export const REASONS: Record<NonNullable<Prompt["reason"]>, { words: string; meaning: string }> = {
  cut: { words: "cut off", meaning: "at least half of its last answers ended at the token limit" },
  no_signal: { words: "no signal", meaning: "its answers never had different scores at one step" },
  rising: { words: "rising", meaning: "its mean reward has risen, not yet to the threshold" },
};
