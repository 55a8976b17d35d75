-- forget_flushes: delete what group commits have left that nobody will ask for: their nodes are gone, or did not get the answer.
-- params   $1 seconds float8
-- returns  nothing
-- locks    the rows; nobody else deletes one so old
-- index    none: there are as many rows as flushers at work, and those that are deleted here
delete from durable.flushes f where f.at < durable.now() - make_interval(secs => $1::float8)
