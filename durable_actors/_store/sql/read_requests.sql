-- read_requests: what commands ask of one node for the instances that it runs.
-- params   $1 owner text
-- returns  id, claim_id, request jsonb
-- locks    none
-- index    gen_durable_requests: an index of nothing while there are no requests, so that a look costs one page
-- keeps    the claim goes with the request: what is asked for a claim that has ended since concerns nobody
select g.id, g.claim_id, g.request
  from durable.gen_durable g
 where g.locked_by = $1::text and g.request is not null
