"""The Lua scripts of the store. Each runs atomically in the server; every key it touches is declared and shares one hash slot.

Records live in one hash (key -> 16 decimal digits of the version, then the value) with a sorted set of the keys beside it, so that
listing by prefix is one range read and never walks an operator's whole keyspace. Versions come from one counter per namespace,
so that a key that was deleted and made again never gets a version back that somebody still remembers.
"""

from __future__ import annotations

VERSION_DIGITS = 16

_FENCED = """
local function fenced(fences, name, token)
  return name ~= '' and tonumber(redis.call('HGET', fences, name) or '0') > tonumber(token)
end
"""

_HELD_VERSION = """
local function held_version(records, key)
  local held = redis.call('HGET', records, key)
  return held and tonumber(string.sub(held, 1, 16)) or 0
end
"""

# KEYS records index counters fences; ARGV key value expected(-1: any) fence_name fence_token -> {status, version}
PUT = (
    _FENCED
    + _HELD_VERSION
    + """
if fenced(KEYS[4], ARGV[4], ARGV[5]) then return {-1, 0} end
local version = held_version(KEYS[1], ARGV[1])
if tonumber(ARGV[3]) >= 0 and tonumber(ARGV[3]) ~= version then return {0, version} end
local new = redis.call('HINCRBY', KEYS[3], 'version', 1)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%016.0f', new) .. ARGV[2])
redis.call('ZADD', KEYS[2], 0, ARGV[1])
return {1, new}
"""
)

# KEYS records index fences; ARGV key expected(-1: any) fence_name fence_token -> status
DELETE = (
    _FENCED
    + _HELD_VERSION
    + """
if fenced(KEYS[3], ARGV[3], ARGV[4]) then return -1 end
local version = held_version(KEYS[1], ARGV[1])
if version == 0 or (tonumber(ARGV[2]) >= 0 and tonumber(ARGV[2]) ~= version) then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""
)

# KEYS records index; ARGV from to limit -> {keys, values}
SCAN = """
local names = redis.call('ZRANGEBYLEX', KEYS[2], ARGV[1], ARGV[2], 'LIMIT', 0, ARGV[3])
if #names == 0 then return {{}, {}} end
return {names, redis.call('HMGET', KEYS[1], unpack(names))}
"""

# KEYS counters fences; ARGV name by fence_name fence_token -> {status, value}
INCREMENT = (
    _FENCED
    + """
if fenced(KEYS[2], ARGV[3], ARGV[4]) then return {-1, 0} end
return {1, redis.call('HINCRBY', KEYS[1], 'count:' .. ARGV[1], ARGV[2])}
"""
)

# KEYS stream attachments streams fences; ARGV name value max_len has_attachment attachment fence_name fence_token -> id | ''
APPEND = (
    _FENCED
    + """
if fenced(KEYS[4], ARGV[6], ARGV[7]) then return '' end
local id = redis.call('XADD', KEYS[1], 'MAXLEN', '=', ARGV[3], '*', 'v', ARGV[2])
if ARGV[4] == '1' then redis.call('XADD', KEYS[2], 'MAXLEN', '=', ARGV[3], id, 'v', ARGV[5]) end
redis.call('SADD', KEYS[3], ARGV[1])
return id
"""
)

# KEYS set records; ARGV member limit while_key -> word
CLAIM = """
if redis.call('HEXISTS', KEYS[2], ARGV[3]) == 0 then return 'gone' end
if redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 1 then return 'already' end
if redis.call('SCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 'full' end
redis.call('SADD', KEYS[1], ARGV[1])
return 'joined'
"""

# KEYS lease fences; ARGV name holder ttl_ms -> token | 0
ACQUIRE = """
local held = redis.call('HMGET', KEYS[1], 'holder', 'token')
if held[1] and held[1] ~= ARGV[2] then return 0 end
local token = held[1] and tonumber(held[2]) or redis.call('HINCRBY', KEYS[2], ARGV[1], 1)
redis.call('HSET', KEYS[1], 'holder', ARGV[2], 'token', token)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return token
"""

# KEYS lease; ARGV token ttl_ms(0: release) -> 1 | 0
RENEW = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
if tonumber(ARGV[2]) > 0 then redis.call('PEXPIRE', KEYS[1], ARGV[2]) else redis.call('DEL', KEYS[1]) end
return 1
"""
