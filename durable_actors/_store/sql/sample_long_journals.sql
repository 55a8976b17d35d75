-- sample_long_journals: instances of which a record far behind the first lies on some random pages of the journal. Retention.
-- params   $1 how many pages float8, on average · $2 moves bigint: an instance that has moved more often is long · $3 at most so many ids int
-- returns  ids, of instances that may have ended
-- locks    none
-- index    none: reads so many pages, whatever the journal's size, and counts the others (10 ms for 10^6 of them)
-- cost     the longer a journal is, the sooner it is met: of 10^6 pages 200 meet one of 5,000 records in two of three tries
select distinct j.instance_id
  from durable.journal j tablesample system (least(100, 100 * $1::float8 / greatest(pg_relation_size('durable.journal'::regclass) / 8192, 1)))
 where j.rev > $2::bigint
 limit $3::int
