/** The pages that the navigation and the command palette lead to, by their place in the address. */

import type { IconName } from "../parts/Icon.svelte";
import { reaches } from "./scopes";
import type { Session } from "./types";

export type PageLink = { name: string; label: string; icon: IconName };
export type PageGroup = { title: string; pages: PageLink[] };

const TRAIN: PageLink[] = [
  { name: "jobs", label: "Jobs", icon: "jobs" },
  { name: "pipelines", label: "Pipelines", icon: "pipelines" },
  { name: "files", label: "Files", icon: "files" },
  { name: "graders", label: "Graders", icon: "graders" },
  { name: "audits", label: "Grader audits", icon: "audits" },
  { name: "models", label: "Models", icon: "models" },
  { name: "arena", label: "Arena", icon: "arena" },
];
const OPERATE: PageLink[] = [
  { name: "usage", label: "Usage", icon: "usage" },
  { name: "keys", label: "Keys", icon: "keys" },
  { name: "webhooks", label: "Webhooks", icon: "webhooks" },
  { name: "audit", label: "Audit log", icon: "audit" },
];
const WORKERS: PageLink = { name: "workers", label: "Workers", icon: "workers" };

/** Workers are shown to operators only: they are those of all projects. */
export function groupsOf(session: Session): PageGroup[] {
  return [
    { title: "Train", pages: TRAIN },
    { title: "Operate", pages: reaches(session, "operator") ? [...OPERATE, WORKERS] : OPERATE },
  ];
}
