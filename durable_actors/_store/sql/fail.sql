-- fail: the step of a runner's claim has failed; it is retried, or ends as failed.
-- params   $1 id bigint · $2 claim uuid · $3 token text · $4 error text (JSON) · $5 retry in float8 seconds or null · $6 max attempts int
--          $7 accept late commits boolean
-- returns  as complete
-- moves    retry · failed · cancelled · compensating · unfit · child_ended · joined · offered · unblocked · doomed
-- locks    as complete
-- index    gen_durable_pkey
-- keeps    I1, I3, I4, I7, I8, I11
select c.verdict from durable.fail($1::bigint, $2::uuid, $3::text, $4::text::jsonb, make_interval(secs => $5::float8), $6::int, $7::boolean) c
