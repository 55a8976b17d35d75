-- truncate_journal: delete some of the oldest records of a live instance, behind a snapshot. Never waits.
-- params   $1 schema text · $2 id bigint · $3 moves bigint, as for find_long_journals · $4 how many records at most int
-- returns  how many it deleted; null: another janitor is at it
-- locks    an advisory lock of the instance, if it is free; then the records, which nobody else writes
-- index    gen_durable_pkey, checkpoints_pkey, journal_pkey
-- keeps    a history that can be read at any time: the newest go first, so that a snapshot follows what is missing
select durable.truncate_journal($1::text, $2::bigint, $3::bigint, $4::int)
