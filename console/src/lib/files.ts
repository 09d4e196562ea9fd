import { jobName } from "./format";
import type { Job } from "./types";

/** What a job has a file for; null: it does not use it. */
export function roleOf(job: Job, file: string): "training" | "validation" | "results" | null {
  if (job.training_file === file) return "training";
  if (job.validation_file === file) return "validation";
  return job.result_files.includes(file) ? "results" : null;
}

/** For each file that jobs use, in what: "training of a, b and 3 more; validation of c". */
export function usesOf(jobs: Job[]): Map<string, string> {
  const NAMED = 2;
  const uses = new Map<string, Map<string, string[]>>();
  for (const job of jobs) {
    for (const file of new Set([job.training_file, job.validation_file, ...job.result_files])) {
      const role = file && roleOf(job, file);
      if (!role) continue;
      const roles = uses.get(file) ?? new Map<string, string[]>();
      uses.set(file, roles.set(role, [...(roles.get(role) ?? []), jobName(job)]));
    }
  }
  const said = ([role, names]: [string, string[]]): string => `${role} of ${names.slice(0, NAMED).join(", ")}${names.length > NAMED ? ` and ${names.length - NAMED} more` : ""}`;
  return new Map([...uses].map(([file, roles]) => [file, [...roles].map(said).join("; ")]));
}
