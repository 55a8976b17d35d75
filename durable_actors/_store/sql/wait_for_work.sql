-- wait_for_work: wait on the server until a queue has a row on offer.
-- params   $1 queue text · $2 seconds between two looks float8 · $3 patience in seconds float8
-- returns  whether there is one; false after so many seconds without
-- locks    none
-- index    gen_durable_pick: one probe per look
select durable.wait_for_work($1::text, $2::float8, $3::float8)
