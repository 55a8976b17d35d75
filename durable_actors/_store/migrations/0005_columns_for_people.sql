-- What people and re-runs need to know of an instance. Constant defaults: no row is rewritten.

alter table durable.gen_durable
    add column round         int not null default 0,  -- committed outcomes of this visit: tells a crash re-run from an intended new run
    add column interruptions int not null default 0,  -- runs that a drain ended; no attempts
    add column tags          text[],                  -- to filter by
    add column meta          jsonb,                   -- a JSON object for people and tools; never state
    add column child_args    bytea,                   -- of what a step started: a digest of its arguments
    add column error_type    text,                    -- class of the exception behind last_error
    add column traceback     text;                    -- its traceback, cut
