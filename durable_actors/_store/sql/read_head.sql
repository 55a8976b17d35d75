-- read_head: the last revision of an instance that its journal must have.
-- params   $1 instance bigint · $2 thread text: names the head that append_records keeps
-- returns  the head; 0 if there is no record. Where every move is recorded, the row's rev is the head, whatever records are there
-- locks    none
-- index    journal_pkey, gen_durable_pkey, checkpoints_pkey
select greatest(
           coalesce((select j.rev from durable.journal j where j.instance_id = $1::bigint order by j.rev desc limit 1), 0),
           coalesce((select g.rev from durable.gen_durable g where g.id = $1::bigint and g.journal >= 3), 0),
           coalesce((select c.rev from durable.checkpoints c where c.thread = $2::text), 0))
