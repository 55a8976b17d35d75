// pg-boss: fill, wait for "go", run. Its settings come from outside; everything else is as it is.
import { createRequire } from "node:module";
import { once } from "node:events";
import { pathToFileURL } from "node:url";

const order = JSON.parse(process.argv[2]);
const require = createRequire(`${order.modules}/`);
const loaded = await import(pathToFileURL(require.resolve("pg-boss")).href);
const PgBoss = loaded.PgBoss ?? loaded.default;
const { Pool } = require("pg");

const boss = new PgBoss({ ...order.where });
boss.on("error", (error) => console.error(error));
await boss.start();
await boss.createQueue("noop");
for (let start = 0; start < order.count; start += 1000) {
  const some = Math.min(1000, order.count - start);
  await boss.insert("noop", Array.from({ length: some }, () => ({ data: {} })));
}
const pool = new Pool({ ...order.where, max: 1 });
await pool.query("vacuum analyze");
await pool.end();
let left = order.count;
const noop = async (jobs) => {
  if (left === order.count) console.log("began");
  left -= jobs.length;
  if (left === 0) console.log("ran");
};
console.log("filled");
await once(process.stdin, "data");
await boss.work("noop", order.settings, noop);
