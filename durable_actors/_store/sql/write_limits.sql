-- write_limits: write the limits of the steps that these instances enter next; of those whose outcome this transaction has written.
-- params   arrays, one element per outcome: $1 id bigint[] · $2 claim uuid[] · $3 limits text[] (`_limits.text_of`), or null: none
-- returns  nothing
-- moves    limited
-- locks    none new
-- index    gen_durable_pkey, kept_slots_pkey
-- keeps    an instance that keeps a slot uses it in every step, until it enters one with another slot (with_kept);
--          only rows that this transaction has written, under that claim: a stale outcome changes no limits
-- cost     a rider: sent only if a step that ended or one that is entered uses limits
update durable.gen_durable g
   set rate_limit = durable.with_kept(g.id, u.limits), rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
  from unnest($1::bigint[], $2::uuid[], $3::text[]) u(id, claim, limits)
 where g.id = u.id and g.claim_id = u.claim and g.xmin = pg_current_xact_id()::xid
returning case when g.journal >= 2 then durable.note(g.id, g.rev, 'limited', g.step, null, g.visit, g.attempt, g.round,
              further => jsonb_build_object('columns', jsonb_build_object('rate_limit', g.rate_limit))) end
