-- will_tell: say that this transaction tells the dependents of the outcomes that it commits, so that their ends need not be noted in `untold`.
-- params   none
-- returns  nothing of use
-- locks    none
-- index    none
-- keeps    only the batch of a flush sends it, with lock_owed and tell_dependents behind its outcomes: all of it is committed, or nothing. A note
--          that is written and deleted again cost 4 µs and 190 bytes of WAL an end
select set_config('durable_actors.tells', 'on', true)
