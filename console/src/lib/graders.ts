/** Graders to start from, the text of one, and runs of it. docs/howto/graders.md describes the types. */

import { ApiError, post } from "./api";
import type { Grader, GraderReport } from "./types";

const OUTPUT = "{{sample.output_text}}";

/** Graders by what they measure; `field` is the field of the row that has the right answer. */
export function templates(field: string): Record<string, Grader> {
  const reference = `{{item.${field}}}`;
  const exact = { type: "string_check", name: "exact", input: OUTPUT, reference, operation: "eq" };
  const close = { type: "text_similarity", name: "close", input: OUTPUT, reference, evaluation_metric: "fuzzy_match" };
  return {
    "The answer equals a field": exact,
    "The answer contains a field, in any case": { ...exact, name: "contains", operation: "ilike" },
    "The answer has the same number or formula": { type: "math", name: "correct", input: OUTPUT, reference },
    "The answer is similar to a field": close,
    "Equal and similar, half each": { type: "multi", name: "both", graders: { exact, close }, calculate_output: "0.5 * exact + 0.5 * close" },
    "Python code": {
      type: "python",
      name: "code",
      source: `def grade(sample, item):\n    answer = sample["output_text"].strip()\n    return 1.0 if answer == str(item["${field}"]) else 0.0\n`,
    },
  };
}

export const write = (grader: Grader): string => JSON.stringify(grader, null, 2);

/** The grader that a text has, or what is wrong with the text. */
export function read(text: string): { grader: Grader | null; problem: string } {
  if (!text.trim()) return { grader: null, problem: "Choose a template, or write a grader as JSON." };
  try {
    const grader: unknown = JSON.parse(text);
    if (typeof grader === "object" && grader !== null && !Array.isArray(grader)) return { grader: grader as Grader, problem: "" };
    return { grader: null, problem: "A grader is a JSON object." };
  } catch (cause) {
    return { grader: null, problem: `This is not JSON: ${(cause as Error).message}` };
  }
}

/** What a grader said about an answer: a score, or why there is none. */
export type Graded = { score: number | null; reason: string; errors: string[]; details: string; output: string; parts: Record<string, number | null> };

export async function run(grader: Grader, answer: string, item: Record<string, unknown>, signal?: AbortSignal): Promise<Graded> {
  try {
    const report = await post<GraderReport>("/fine_tuning/alpha/graders/run", { grader, model_sample: answer, item }, signal);
    const { errors, reason, output, scores } = report.metadata;
    const names = Object.keys(errors).filter((name) => errors[name] === true);
    const details = names.map((name) => errors[`${name}_details`]).filter((one) => typeof one === "string");
    // A failed part of a multi grader has its substitute score, if the grader names one.
    const isGraded = !names.length || typeof grader.invalid_grade === "number";
    return { score: isGraded ? report.reward : null, reason, errors: names, details: details.join("\n"), output, parts: scores };
  } catch (cause) {
    if (!(cause instanceof ApiError)) throw cause;
    return { score: null, reason: cause.message, errors: ["refused"], details: "", output: "", parts: {} };
  }
}

/** Call `act` on each item, at most `atOnce` at a time. */
export async function inTurn<T>(items: T[], atOnce: number, act: (item: T, index: number) => Promise<void>): Promise<void> {
  let next = 0;
  const worker = async (): Promise<void> => {
    while (next < items.length) {
      const index = next++;
      await act(items[index]!, index);
    }
  };
  await Promise.all(Array.from({ length: Math.min(atOnce, items.length) }, worker));
}
