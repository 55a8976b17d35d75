-- read_keeps: for how long machines say that their ended instances are kept; each length once.
-- params   none
-- returns  seconds
-- locks    none
-- index    keeps_pkey: it reads all of a small table
select distinct k.seconds from durable.keeps k where k.seconds is not null order by k.seconds
