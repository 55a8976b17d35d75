-- complete: commit the outcome of a runner's claim.
-- params   $1 id bigint · $2 claim uuid · $3 token text · $4 outcome text (JSON) · $5 accept late commits boolean
-- returns  committed, or already_completed. Refused with RD001 to RD005; nothing was written then
-- moves    started · next · retry · parked · asked · spawned · done · failed · cancelled · compensating · unfit · woken · child_ended · joined · limited ·
--          offered · unblocked · doomed
-- locks    the row, then its parent: as an engine's commit, child before parent. It waits for both
-- index    gen_durable_pkey; those of commit_parks, park_parent and their riders, whose text its parts have
-- keeps    I1, I3, I4, I6, I7, I8, I11
select c.verdict from durable.complete($1::bigint, $2::uuid, $3::text, $4::text::jsonb, $5::boolean) c
