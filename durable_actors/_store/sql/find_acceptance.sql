-- find_acceptance: the last record by which somebody accepted the row of an instance as it is, after a revision.
-- params   $1 instance bigint · $2 after this rev bigint
-- returns  its rev; nothing if there is none
-- locks    none
-- index    journal_pkey
-- cost     reads the records back to it, or to $2: for histories that have damage
select j.rev from durable.journal j
 where j.instance_id = $1::bigint and j.rev > $2::bigint and j.kind = 'snapshot' and j.data -> 'command' ->> 'type' = 'accept'
 order by j.rev desc limit 1
