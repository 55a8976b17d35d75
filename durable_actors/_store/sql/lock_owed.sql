-- lock_owed: lock what is known of ended instances in their graphs, before tell_dependents reads it with a newer snapshot.
-- params   $1 ended instances bigint[]
-- returns  id
-- locks    their rows of `graph`, FOR UPDATE in id order: whoever revives a dependent (durable.wait_again) locks the same rows, so either
--          it finds the instance ended, or the tell finds the dependent
-- index    graph_pkey
select e.id from durable.graph e where e.id = any ($1::bigint[]) order by e.id for update
