/** Waiting that ends with the component: what was derived for a page that was left is out of date, and Svelte warns of reading it. */
import { onDestroy } from "svelte";

/**
 * Call it while a component is created. The function that it returns waits for a promise; if the component is left meanwhile,
 * the code after it does not run: `const found = await here(get(path))`. A sequence of requests that must not end halfway
 * reads what it needs before its first `await` instead.
 */
export function whileHere(): <T>(wait: PromiseLike<T>) => Promise<T> {
  let isLeft = false;
  onDestroy(() => {
    isLeft = true;
  });
  return (wait) =>
    new Promise((resolve, reject) => {
      wait.then(
        (value) => {
          if (!isLeft) resolve(value);
        },
        (cause: unknown) => {
          if (!isLeft) reject(cause as Error);
        },
      );
    });
}
