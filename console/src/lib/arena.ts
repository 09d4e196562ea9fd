/** Models side by side: one prompt, an answer of each as it is written, and votes. */

import { ApiError, events } from "./api";
import type { Graded } from "./graders";
import type { Message } from "./rows";

export type Sampling = { temperature: number; seed: number; max_completion_tokens: number };
export type Answer = {
  model: string;
  text: string;
  reasoning: string;
  /** "length" where it was cut off; null while it is written. */
  finish: string | null;
  seconds: number | null;
  problem: string;
  graded: Graded | null;
};
export type Vote = {
  messages: Message[];
  answers: { model: string; text: string; score: number | null }[];
  /** A model, or null for answers that are equally good. */
  winner: string | null;
  blind: boolean;
  sampling: Sampling;
};

type Chunk = {
  choices?: { delta?: { content?: string | null; reasoning_content?: string | null }; finish_reason?: string | null }[];
  error?: { message?: string };
};

export const unwritten = (model: string): Answer => ({ model, text: "", reasoning: "", finish: null, seconds: null, problem: "", graded: null });

/** Have a model answer; `change` gets what has been written so far. A refusal is a problem of its answer. */
export async function ask(model: string, messages: Message[], sampling: Sampling, signal: AbortSignal, change: (answer: Answer) => void): Promise<Answer> {
  const began = performance.now();
  const answer = unwritten(model);
  try {
    for await (const chunk of events<Chunk>("/chat/completions", { model, messages, ...sampling, stream: true }, signal)) {
      if (chunk.error) throw new ApiError(0, chunk.error.message ?? "The answer broke off.");
      const choice = chunk.choices?.[0];
      answer.text += choice?.delta?.content ?? "";
      answer.reasoning += choice?.delta?.reasoning_content ?? "";
      answer.finish = choice?.finish_reason ?? answer.finish;
      change({ ...answer });
    }
    if (answer.finish === null) answer.problem = "The answer broke off.";
  } catch (cause) {
    answer.problem = signal.aborted ? "Stopped." : (cause as Error).message;
  }
  answer.seconds = (performance.now() - began) / 1000;
  change({ ...answer });
  return answer;
}

/** In an order that says nothing about the models. */
export function shuffled<T>(items: T[]): T[] {
  return items
    .map((item): [number, T] => [Math.random(), item])
    .sort(([a], [b]) => a - b)
    .map(([, item]) => item);
}

/** For each model, how often it won, lost, and was as good as the others. */
export function tally(votes: Vote[]): { model: string; won: number; lost: number; tied: number }[] {
  const counts = new Map<string, { model: string; won: number; lost: number; tied: number }>();
  for (const vote of votes) {
    for (const { model } of vote.answers) {
      const count = counts.get(model) ?? { model, won: 0, lost: 0, tied: 0 };
      if (vote.winner === null) count.tied += 1;
      else if (vote.winner === model) count.won += 1;
      else count.lost += 1;
      counts.set(model, count);
    }
  }
  return [...counts.values()].sort((a, b) => b.won - a.won || a.lost - b.lost);
}
