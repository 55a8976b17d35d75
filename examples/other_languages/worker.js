// A worker in Node: it needs the package pg, and runs the steps of the machine "report" and of its pages. See reports.py.
//
//   npm install pg && DURABLE_DSN=postgresql://... node worker.js
'use strict'
const { Client } = require('pg')
const { setTimeout: sleep } = require('node:timers/promises')

const LEASE = process.env.LEASE ?? '1 minute'
const EVERY = 1000 * Number(process.env.HEARTBEAT_EVERY ?? 20)
const POLL = 1000 * Number(process.env.POLL ?? 1)
const LEASE_LOST = 'RD001'

// Each step returns its outcome. `signal` is aborted if the claim is lost: whatever the step does then is for nothing.
const steps = {
  'report/start': async () => ({ next: 'ask' }),
  'report/ask': async () => ({ await: 'approved', then: 'write', timeout: 3600 }),
  'report/write': async ({ state, awaited }) => ({
    children: Array.from({ length: state.pages }, (_, n) => ({ machine: 'page', queue: 'reports', state: { page: n + 1 } })),
    then: 'finish',
    state: { by: awaited[0].payload.by }
  }),
  'report/finish': async ({ state, children }) => ({ done: { pages: children.map(child => child.result), by: state.by } }),
  'page/start': async ({ state, attempt }, signal) => {
    if (state.page === 2 && attempt === 0) throw new Error('the ink has run out')
    await sleep(1000 * Number(process.env.PAGE_TAKES ?? 0), null, { signal })
    return { done: `page ${state.page}` }
  }
}

async function run (db, claim) {
  const fence = [claim.id, claim.claim_id, claim.token]
  const lost = new AbortController()
  const beat = setInterval(() => {
    db.query('select lease_until from durable.heartbeat($1, $2, $3, $4)', [...fence, LEASE])
      .catch(error => { if (error.code === LEASE_LOST) lost.abort() })
  }, EVERY)
  try {
    const outcome = await steps[`${claim.machine}/${claim.step}`](claim, lost.signal)
    return await db.query('select verdict, status from durable.complete($1, $2, $3, $4)', [...fence, JSON.stringify(outcome)])
  } catch (error) {
    if (lost.signal.aborted || error.code === LEASE_LOST) return null // somebody else runs it
    const told = JSON.stringify({ type: error.name, text: error.message, traceback: error.stack })
    return await db.query("select verdict, status from durable.fail($1, $2, $3, $4, '1 second')", [...fence, told])
  } finally {
    clearInterval(beat)
  }
}

async function main () {
  const db = new Client({ connectionString: process.env.DURABLE_DSN })
  await db.connect()
  let stopping = false
  process.on('SIGTERM', () => { stopping = true })
  while (!stopping) {
    const { rows: [claim] } = await db.query('select * from durable.claim_next($1, $2, $3, $4)', ['reports', Object.keys(steps), `node-${process.pid}`, LEASE])
    if (!claim) { await sleep(POLL); continue }
    const ended = await run(db, claim)
    console.log(`${claim.id} ${claim.machine}/${claim.step}: ${ended ? ended.rows[0].status : 'lost'}`)
  }
  await db.end()
}

main()
