/** What the key of a session may do; each scope includes those before it. */

import type { Session } from "./types";

const SCOPES = ["read", "write", "admin", "operator"];

export const reaches = (session: Session, scope: "write" | "admin" | "operator"): boolean => SCOPES.indexOf(session.scope) >= SCOPES.indexOf(scope);
