// Graphile Worker: fill, wait for "go", run. Its settings come from outside; everything else is as it is.
import { createRequire } from "node:module";
import { once } from "node:events";

const order = JSON.parse(process.argv[2]);
const require = createRequire(`${order.modules}/`);
const { Logger, makeWorkerUtils, run } = require("graphile-worker");
const { Pool } = require("pg");

const pgPool = new Pool({ ...order.where, max: 12 });
pgPool.on("error", console.error);
pgPool.on("connect", (client) => client.on("error", console.error));
const logger = new Logger(() => () => {});
const utils = await makeWorkerUtils({ pgPool, logger });
await utils.migrate();
for (let start = 0; start < order.count; start += 1000) {
  const some = Math.min(1000, order.count - start);
  await utils.addJobs(Array.from({ length: some }, () => ({ identifier: "noop", payload: {} })));
}
await pgPool.query("vacuum analyze");
let left = order.count;
const noop = async () => {
  if (left === order.count) console.log("began");
  left -= 1;
  if (left === 0) console.log("ran");
};
console.log("filled");
await once(process.stdin, "data");
const { concurrency, localQueue, completions } = order.settings;
const worker = {
  ...(concurrency && { concurrentJobs: concurrency }),
  ...(localQueue && { localQueue: { size: localQueue } }),
  ...(completions !== undefined && { completeJobBatchDelay: completions }),
};
await run({ pgPool, logger, taskList: { noop }, noHandleSignals: true, preset: { worker } });
