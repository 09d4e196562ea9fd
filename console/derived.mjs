// Names the lines of components that read a `$derived`, a property or the address after an `await` without `here`.
//
// When the component was left meanwhile, a derived value no longer changes and Svelte warns (derived_inert), and the address is
// that of another page. `here` (src/lib/here.ts) ends the function there. Usage: node derived.mjs FOLDER
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { parse } from "svelte/compiler";

const FUNCTIONS = new Set(["FunctionDeclaration", "FunctionExpression", "ArrowFunctionExpression"]);
const LOOPS = new Set(["ForStatement", "ForInStatement", "ForOfStatement", "WhileStatement", "DoWhileStatement"]);
const GUARD = "here";

function* children(node) {
  for (const [key, value] of Object.entries(node)) {
    if (key === "metadata" || key.startsWith("type")) continue; // types have no values
    for (const one of Array.isArray(value) ? value : [value]) if (one && typeof one.type === "string") yield [key, one];
  }
}

/** Each node inside of one that `enter` lets in, with the node around it and its key there. */
function* walk(node, enter = () => true) {
  for (const [key, child] of children(node)) {
    if (!enter(child, node, key)) continue;
    yield [child, node, key];
    yield* walk(child, enter);
  }
}

function* namesOf(pattern) {
  if (pattern.type === "Identifier") yield pattern.name;
  else if (pattern.type === "ObjectPattern") for (const one of pattern.properties) yield* namesOf(one.value ?? one.argument);
  else if (pattern.type === "ArrayPattern") for (const one of pattern.elements) { if (one) yield* namesOf(one); }
  else if (pattern.type === "AssignmentPattern") yield* namesOf(pattern.left);
  else if (pattern.type === "RestElement") yield* namesOf(pattern.argument);
}

/** The name of what a call calls, such as `get`; of a method, that of its object: `$derived` of `$derived.by(...)`. */
function calleeOf(node) {
  if (node?.type !== "CallExpression") return "";
  return (node.callee.type === "MemberExpression" ? node.callee.object : node.callee).name ?? "";
}

/** The lines of a component that read such a value when it may have been left, as `LINE: NAME`. */
function problems(source) {
  const root = parse(source, { modern: true });
  const inert = new Set(["place", "setQuery"]); // of the address, derived values and properties
  const functions = new Map(); // the functions of the component by name
  for (const statement of root.instance?.content.body ?? []) {
    if (statement.type === "FunctionDeclaration") functions.set(statement.id.name, statement);
    for (const one of statement.type === "VariableDeclaration" ? statement.declarations : []) {
      if (["$derived", "$props"].includes(calleeOf(one.init))) for (const name of namesOf(one.id)) inert.add(name);
      if (FUNCTIONS.has(one.init?.type)) functions.set(one.id.name, one.init);
    }
  }
  const found = new Set();
  const lineOf = (position) => source.slice(0, position).split("\n").length;

  function isRead(node, parent, key) {
    if (node.type !== "Identifier" || key === "id") return false;
    if (parent.type === "MemberExpression" && key === "property" && !parent.computed) return false;
    return !(parent.type === "Property" && key === "key" && !parent.shorthand);
  }

  const readBy = new Map(); // the names that a function of the component reads

  function namesReadBy(name) {
    if (!readBy.has(name)) {
      readBy.set(name, new Set()); // for functions that call each other
      readBy.set(name, new Set([...reads(functions.get(name))].map(([, one]) => one)));
    }
    return readBy.get(name);
  }

  /** Where a node reads such a value, itself or in a function of the component, and the name of the value. */
  function* reads(node) {
    const own = new Set();
    for (const [child] of walk({ type: "", node }))
      if (child.type === "VariableDeclarator") for (const name of namesOf(child.id)) own.add(name);
      else if (FUNCTIONS.has(child.type)) for (const one of child.params) for (const name of namesOf(one)) own.add(name);
    for (const [child, parent, key] of walk({ type: "", node })) {
      if (!isRead(child, parent, key) || own.has(child.name)) continue;
      if (inert.has(child.name)) yield [child, child.name];
      else if (functions.has(child.name)) for (const name of namesReadBy(child.name)) yield [child, name];
    }
  }

  /** Whether code after this expression does not run once the component is left. */
  function isGuarded(expression, seen = new Set()) {
    if (expression.type !== "CallExpression") return false;
    if (expression.callee.type === "MemberExpression") return isGuarded(expression.callee.object, seen);
    const name = calleeOf(expression);
    if (name === GUARD || seen.has(name)) return true;
    if (!functions.has(name)) return false;
    const awaits = [...awaitsIn(functions.get(name).body)];
    return awaits.length > 0 && awaits.every(([one]) => one.type === "AwaitExpression" && isGuarded(one.argument, new Set([...seen, name])));
  }

  /** The awaits of a function, without those of functions in it, each with where the code begins that runs after it. */
  function* awaitsIn(body) {
    const loops = [];
    for (const [child] of walk({ type: "", body }, (one) => !FUNCTIONS.has(one.type))) {
      if (LOOPS.has(child.type)) loops.push(child);
      const isLoop = child.type === "ForOfStatement" && child.await;
      if (child.type !== "AwaitExpression" && !isLoop) continue;
      const around = loops.find((one) => one.start <= child.start && child.end <= one.end);
      yield [child, around ? around.start : child.end];
    }
  }

  function report(node, name) {
    found.add(`${lineOf(node.start)}: ${name}`);
  }

  for (const [child] of walk(root)) {
    if (FUNCTIONS.has(child.type)) {
      const waits = [...awaitsIn(child.body)].filter(([one]) => one.type !== "AwaitExpression" || !isGuarded(one.argument));
      const first = Math.min(...waits.map(([, from]) => from));
      for (const [read, name] of reads(child)) if (read.start >= first) report(read, name);
    }
    const isCallback = child.type === "CallExpression" && ["then", "catch", "finally"].includes(child.callee.property?.name);
    if (isCallback && !isGuarded(child.callee.object)) for (const one of child.arguments) for (const [read, name] of reads(one)) report(read, name);
  }
  return [...found];
}

let count = 0;
for (const name of readdirSync(process.argv[2], { recursive: true }).sort()) {
  if (!name.endsWith(".svelte")) continue;
  for (const problem of problems(readFileSync(join(process.argv[2], name), "utf8"))) {
    count += 1;
    console.log(`${name}:${problem} is read after an await: wait with here(...), or read it before`);
  }
}
process.exitCode = count ? 1 : 0;
