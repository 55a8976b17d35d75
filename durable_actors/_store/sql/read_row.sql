-- read_row: the whole row of an instance, as it is stored.
-- params   $1 id bigint
-- returns  the row as JSON, with bytes in hexadecimal digits, whatever `bytea_output` the caller has; nothing if there is none
-- locks    none
-- index    gen_durable_pkey
select to_jsonb(g) || jsonb_build_object('unique_key', chr(92) || 'x' || encode(g.unique_key, 'hex'),
                                         'child_args', chr(92) || 'x' || encode(g.child_args, 'hex'),
                                         'claim_token_hash', chr(92) || 'x' || encode(g.claim_token_hash, 'hex'),
                                         'fingerprint', chr(92) || 'x' || encode(g.fingerprint, 'hex'))
  from durable.gen_durable g where g.id = $1::bigint
