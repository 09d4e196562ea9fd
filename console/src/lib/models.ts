/** Names of tuned models. A checkpoint has the name of its job's model and a suffix. */

import type { BaseModel, Job, Model } from "./types";

const CHECKPOINT = /:ckpt-step-\d+$/;

export const finalName = (name: string): string => name.replace(CHECKPOINT, "");

export function jobOf(jobs: Job[], name: string): Job | undefined {
  return jobs.find((job) => job.fine_tuned_model !== null && job.fine_tuned_model === finalName(name));
}

export function checkpointsOf(models: Model[], name: string): Model[] {
  return models.filter((one) => one.id !== finalName(one.id) && finalName(one.id) === finalName(name));
}

/** "31 of 80 GiB". */
export function fits(memory: NonNullable<BaseModel["memory"]>): string {
  return memory.needed_gib === null ? `needs more than ${Math.floor(memory.gpu_gib)} GiB` : `fits: ${Math.ceil(memory.needed_gib)} of ${Math.floor(memory.gpu_gib)} GiB`;
}

/** What a verdict on the training file is worth; empty: the validation rows are others. */
export const caveat = (verdict: NonNullable<Job["verdict"]>): string => (verdict.held_out ? "" : "The validation file is the training file, so this proves nothing about new prompts.");

/** The outcome of a job's verdict in words. */
export const verdictText = (outcome: NonNullable<Job["verdict"]>["outcome"]): string => (outcome === "too_few" ? "too few rows to tell" : outcome.replace("_", " "));
