/** Names of tuned models. A checkpoint has the name of its job's model and a suffix. */

import type { Job, Model } from "./types";

const CHECKPOINT = /:ckpt-step-\d+$/;

export const finalName = (name: string): string => name.replace(CHECKPOINT, "");

export function jobOf(jobs: Job[], name: string): Job | undefined {
  return jobs.find((job) => job.fine_tuned_model !== null && job.fine_tuned_model === finalName(name));
}

export function checkpointsOf(models: Model[], name: string): Model[] {
  return models.filter((one) => one.id !== finalName(one.id) && finalName(one.id) === finalName(name));
}
