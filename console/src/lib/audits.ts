/** Audits of graders: what is tried before a grader trains. docs/howto/grader-audits.md describes them. */

import { count, percent } from "./format";
import type { GraderAudit, GraderAuditReport } from "./types";

type Verdict = NonNullable<GraderAudit["verdict"]>;

/** A sign and a word for each verdict, so that neither depends on color. */
export const VERDICTS: Record<Verdict, { sign: string; kind: string; word: string }> = {
  go: { sign: "✓", kind: "good", word: "train with it" },
  caution: { sign: "!", kind: "warn", word: "look at it first" },
  unknown: { sign: "?", kind: "", word: "not known" },
  stop: { sign: "✕", kind: "bad", word: "do not train with it" },
};

export const isOver = (audit: GraderAudit): boolean => audit.status !== "in_progress";

export function graderName(audit: GraderAudit): string {
  const grader = audit.request.grader as { name?: string; type?: string } | undefined;
  return grader?.name ?? grader?.type ?? "a grader";
}

/** "2 of 400, 1 % (0 % to 2 %)". */
export function rateText(rate: GraderAuditReport["false_positives"]): string {
  if (rate.share === null) return "none was graded";
  return `${count(rate.wrong)} of ${count(rate.answers)}, ${percent(rate.share.expected)} (${percent(rate.share.low)} to ${percent(rate.share.high)})`;
}

export const kindText = (kind: string): string => kind.replaceAll("_", " ");
