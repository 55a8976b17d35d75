-- read_expired: instances whose lease has expired: what reap_claims would take back.
-- params   none
-- returns  id, in order
-- locks    none
-- index    gen_durable_executing
select y.id from durable.gen_durable y
 where y.status = 'executing'
   and (y.lease_expires_at <= pg_catalog.now() or y.lease_expires_at > pg_catalog.now() + interval '11 years')
 order by y.id
