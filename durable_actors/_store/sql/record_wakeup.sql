-- record_wakeup: record that a notifier was told of an attempt.
-- params   $1 id bigint · the attempt, as it was told: $2 step text · $3 visit bigint · $4 attempt int · $5 round int ·
--          $6 visible at timestamptz
-- returns  rev; nothing if the instance has ended, or does not record every move
-- moves    wakeup
-- locks    its row
-- index    gen_durable_pkey
-- keeps    I8 what has ended stays as it is: a notifier may be slower than the instance. It may be slower than the attempt, too:
--          so the caller says which attempt was told. Whoever owns the row is not disturbed: no fence has the rev in it. Repeated
--          after an answer that was lost, it leaves a second record, which changes nothing.
update durable.gen_durable g
   set rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
 where g.id = $1::bigint and g.journal >= 3 and g.finished_at is null
returning g.rev, durable.note(g.id, g.rev, 'wakeup', $2::text, null, $3::bigint, $4::int, $5::int,
                              further => jsonb_build_object('visible_at', $6::timestamptz))
